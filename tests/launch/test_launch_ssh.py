"""`--on ssh`, over real ssh servers on the loopback: what is refused, and runs from beginning to end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from paceline.launch import record, seats
from paceline.launch.engines import ssh
from paceline.launch.secure_shell import SecureShell
from paceline.launch.spec import JobSpec, Room
from tests.launch._scripts import LIMIT_S, LONG
from tests.launch._ssh import DIGITS, Place, accuracy, place, servers_of, until

__all__ = ["place"]

HOSTS = ("-n", "2", "--hosts", "a:1,b:1")


# ---- what is refused


def test_a_host_on_which_nothing_listens(place: Place) -> None:
    place.servers.stop("b")
    said = place.refused(*HOSTS)
    assert "host b: nothing listens there (tried ssh -F" in said
    assert "start sshd on it" in said


def test_a_host_that_nobody_knows(place: Place) -> None:
    said = place.refused("-n", "2", "--hosts", "a:1,nowhere.invalid:1")
    assert "host nowhere.invalid: its name is not known" in said


def test_a_key_that_is_refused(place: Place) -> None:
    folder = place.servers.dir
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "other")], check=True)
    config = folder / "config"
    config.write_text(config.read_text().replace(f"{folder}/key", f"{folder}/other"))
    said = place.refused(*HOSTS)
    for host in "ab":
        assert f"host {host}: it refused every key" in said
        assert f"ssh-copy-id {host}" in said


@pytest.mark.parametrize("known", ["unknown", "changed"])
def test_a_host_key_that_is_not_the_known_one(place: Place, known: str) -> None:
    file = place.servers.dir / "known_hosts"
    first, second = file.read_text().splitlines()
    swapped = [*second.split()[:1], *first.split()[1:]]
    file.write_text(f"{first}\n" + (" ".join(swapped) + "\n" if known == "changed" else ""))
    before = file.read_text()
    said = place.refused(*HOSTS)
    if known == "unknown":
        assert "host b: its host key is not in known_hosts" in said
        assert "connect once by hand" in said
    else:
        assert "host b: its host key is another one than in known_hosts" in said
    assert file.read_text() == before


def test_a_host_with_another_torch(tmp_path: Path) -> None:
    """Its Python is another environment, which comes first on the path there."""
    other = _environment(tmp_path / "venv", torch="2.9.0")
    for name, python in (("a", sys.executable), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run-python").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        (tmp_path / name / "run-python").chmod(0o755)
    paths = {name: f"SetEnv PATH={tmp_path / name}:{os.environ['PATH']}" for name in "ab"}
    with servers_of(tmp_path, more=paths) as servers:
        said = Place(tmp_path / "work", servers).refused(*HOSTS, "--python", "run-python")
    assert re.search(r"host b: has torch 2\.9\.0 \(of .*venv/bin/python\), this host \d", said)
    assert "host a" not in said


def test_a_host_without_that_python(place: Place) -> None:
    said = place.refused(*HOSTS, "--python", "/opt/nowhere/python")
    assert "host a: there is no /opt/nowhere/python" in said
    assert "--python PATH" in said


def test_a_login_that_is_refused_in_words_on_the_output(tmp_path: Path) -> None:
    """As nologin does it, also behind a banner, which goes to the other stream."""
    (tmp_path / "banner").write_text("Property of nobody\n")
    refuse = "ForceCommand echo This account is currently not available.; exit 1"
    more = {"a": refuse, "b": f"{refuse}\nBanner {tmp_path}/banner"}
    with servers_of(tmp_path, more=more) as servers:
        said = Place(tmp_path / "work", servers).refused(*HOSTS)
    assert "host a: This account is currently not available. (tried ssh -F" in said
    assert "host b: This account is currently not available.; Property of nobody (tried ssh -F" in said
    assert said.count(", exit code 1)") == 2


def test_a_port_that_is_in_use(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = place.refused(*HOSTS, "--port", str(port))
    assert f"this host: port {port} of 127.0.0.1 cannot be had (Address already in use)" in said
    assert "give another --port" in said


def test_too_few_slots(place: Place) -> None:
    said = place.refused("-n", "4", "--hosts", "a:1,b:2")
    assert "4 members need as many slots, and there are 3: a (1), b (2)" in said
    assert "-n 3" in said


def test_ssh_is_not_installed(place: Place) -> None:
    said = place.refused(*HOSTS, env={"PATH": "/nowhere"})
    assert "apt-get install openssh-client" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-n", "2"), r"which hosts\?"),
        ((*HOSTS, "--start-on", "rsh {host}"), "--start-on does not go with --on ssh"),
        ((*HOSTS, "--interface", "nothing0"), r"--interface 'nothing0': this host has .*\blo\b"),
        ((*HOSTS, "--env", "NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE: it is not set here"),
        ((*HOSTS, "--env", "PACELINE_RANK=1"), "the launcher sets it"),
        ((*HOSTS, "--strategy", "async", "--slots", "1"), "--slots is for elastic runs of all-reduce"),
        ((*HOSTS, "--transport", "gloo", "--standbys", "1"), "--standbys is for runs whose members may come and go"),
        (("-n", "1:2", "--hosts", "a,b", "--transport", "gloo"), "-n MIN:MAX does not go with --transport gloo"),
        (("-n", "2", "--hosts", "nowhere.invalid:2"), "host nowhere.invalid: no way to it is known here"),
        (("-n", "2", "--hosts", "missing.txt"), "there is no such file"),
        (("-n", "2", "--hosts", "a:1,a:1"), "stands there twice"),
        (("-n", "2", "--hosts", "a:0,b:x"), "is not a host's name"),
        (("-n", "2", "--hosts", "/dev/null"), "can be read only once, or not at all: give a file, or a program"),
    ],
)
def test_options_that_do_not_fit(place: Place, options: tuple[str, ...], message: str) -> None:
    assert re.search(message, place.refused(*options))


def test_options_of_ssh_without_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--sync", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "it is an option of --on ssh" in done.stderr) == (2, True)


def test_a_file_that_names_no_host(place: Place) -> None:
    (place.folder / "hosts.txt").write_text("# nobody yet\n")
    for options in (
        ("-n", "2"),
        ("-n", "1:2", "--slots", "1", "--listen", "127.0.0.1"),
        ("-n", "2", "--mesh", "shard=2"),
    ):
        assert "hosts.txt': no line of it names a host" in place.refused(*options, "--hosts", "hosts.txt")


# ---- what is started


def test_a_dry_run_shows_each_host_and_asks_none(place: Place) -> None:
    for name in "ab":
        place.servers.stop(name)
    done = place.run(*HOSTS, "--dry-run", "--env", "WORD=hidden thing", "--port", "4711")
    assert done.returncode == 0, done.stderr
    assert "# the scheduler here, at 127.0.0.1:4711" in done.stdout
    assert "# host b, in " in done.stdout
    assert "agent --join - --name b --slots 1" in done.stdout
    assert "BatchMode=yes" in done.stdout
    assert not (place.folder / "runs").exists()


def test_hosts_without_numbers_share_the_members(place: Place) -> None:
    done = place.run("-n", "5", "--hosts", "a,b", "--dry-run")
    assert re.findall(r"--name (\w) --slots (\d)", done.stdout) == [("a", "3"), ("b", "3")]


def test_members_on_two_hosts(place: Place) -> None:
    """With the environment that was named, of which nothing stands on a command line."""
    place.script(
        "import os, pathlib, paceline\n"
        "run = paceline.join()\n"
        "lines = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline') if os.access(p, os.R_OK)]\n"
        "word = os.environ['SECRET'].encode()\n"
        "print(run.rank, run.size, word[::-1].decode(), any(word in line for line in lines), os.getcwd())\n"
    )
    done = place.run(*HOSTS, "--env", "SECRET", env={"SECRET": "xyzzy-4711-xyzzy", "PACELINE_OTHER": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"[{rank}] {rank} 2 yzzyx-1174-yzzyx False {place.folder}" in done.stdout
    assert "2 hosts with Python" in done.stderr
    assert "xyzzy" not in done.stderr
    assert sorted(re.findall(r"\[(\d)\] \d 2 yzzyx", place.logs)) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_hosts_by_their_ipv6_address(tmp_path: Path) -> None:
    with servers_of(tmp_path, ("::1",), addresses={"::1": "::1"}) as servers:
        place = Place(tmp_path / "work", servers)
        (place.folder / "hosts.txt").write_text("[::1]:2\n")
        for hosts in ("[::1]:2", "hosts.txt"):
            done = place.run("-n", "2", "--hosts", hosts)
            assert done.returncode == 0, done.stdout + done.stderr
            assert sorted(re.findall(r"hello (\d) 2", done.stdout)) == ["0", "1"]


@pytest.mark.slow
def test_members_here_and_there(place: Place) -> None:
    done = place.run("-n", "2", "--hosts", "b:1", "--slots", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"hello (\d) 2", done.stdout)) == ["0", "1"]


@pytest.mark.slow
def test_an_elastic_run_begins_without_a_host_that_is_down(place: Place) -> None:
    place.servers.stop("b")
    done = place.run("-n", "1:2", "--hosts", "a:1,b:1", "--join-limit-s", "600")  # it is not waited for
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning: host b: nothing listens there" in done.stderr
    assert "the run begins without host b, which is used once it is reached" in done.stderr
    assert "hello 0" in done.stdout
    assert "waiting" not in done.stderr


@pytest.mark.slow
def test_an_elastic_run_begins_here_when_all_hosts_are_down(place: Place) -> None:
    for name in "ab":
        place.servers.stop(name)
    done = place.run("-n", "1:3", "--hosts", "a:1,b:1", "--slots", "1", "--join-limit-s", "600")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run begins without host a, b" in done.stderr
    assert "hello 0" in done.stdout


@pytest.mark.slow
def test_an_elastic_run_waits_for_hosts_that_it_cannot_do_without(place: Place) -> None:
    place.servers.stop("b")
    with place.begin("-n", "2:3", "--hosts", "a:1,b:2") as process:
        line = (
            "waiting for host b (reached 1 of 2; needs at least 2 members there, and has room for 1), for up to 120 s"
        )
        until(lambda: f"{line}: host b: nothing listens there" in place.output, lambda: place.output)
        place.servers.start("b")
        assert process.wait(LIMIT_S) == 0, place.output
    assert place.output.count("waiting for") == 1
    assert sorted(set(re.findall(r"hello (\d)", place.output))) == ["0", "1", "2"]


def test_hosts_are_waited_for_until_the_limit(place: Place) -> None:
    place.servers.stop("b")
    said = place.refused("-n", "2:3", "--hosts", "a:1,b:2", "--join-limit-s", "3")
    assert "waiting for host b (reached 1 of 2" in said
    assert "error: host b: nothing listens there" in said


def test_what_does_not_pass_by_itself_is_not_waited_for(place: Place) -> None:
    for hosts in ("a:1,nowhere.invalid:2", "a:1,b:1,nowhere.invalid:2"):
        if "b:" in hosts:
            place.servers.stop("b")
        said = place.refused("-n", "3:4", "--hosts", hosts)
        assert "host nowhere.invalid: its name is not known" in said
        assert "waiting" not in said


@pytest.mark.slow
def test_digits_reach_their_accuracy(place: Place) -> None:
    place.script(DIGITS.read_text())
    done = place.run(*HOSTS, "--threads", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracy(done.stdout) >= 97.0


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--strategy", "async"), ("--mesh", "shard=2"), ("--transport", "gloo")])
def test_runs_whose_members_stay(place: Place, options: tuple[str, ...]) -> None:
    script = DIGITS.read_text()
    if "--mesh" in options:
        script = script.replace("Net().to(run.device)", "run.model(Net())")
    place.script(script)
    done = place.run(*HOSTS, "--threads", "1", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracy(done.stdout) >= 97.0
    assert "RuntimeWarning" not in done.stderr


@pytest.mark.slow
def test_a_worker_that_is_lost_is_started_again(place: Place) -> None:
    place.script(LONG)
    with place.begin(*HOSTS, "--strategy", "async", "--replacements", "2") as process:
        until(lambda: place.logs.count("] step") > 4, lambda: place.output)
        workers = members(place.folder)
        assert len(workers) == 2, place.output
        os.kill(workers[-1], signal.SIGKILL)
        until(lambda: "started again in" in place.output, lambda: place.output)
        until(lambda: len(members(place.folder)) == 2, lambda: place.output)
        assert "was killed by signal 9; the others go on; it is started again" in place.output
        until(lambda: "joined: 2 members train now" in place.output, lambda: place.output)
        done = place.paceline("stop", "it")
        assert done.returncode == 0, done.stdout + done.stderr
        assert process.wait(LIMIT_S) == 143, place.output
    until(lambda: members(place.folder) == [], lambda: str(members(place.folder)))


@pytest.mark.slow
def test_a_member_that_stays_and_is_killed_is_told_with_its_signal(place: Place) -> None:
    place.script("import os, paceline\nrun = paceline.join()\nif run.rank: os.kill(os.getpid(), 9)\nrun.barrier()\n")
    done = place.run(*HOSTS, "--transport", "gloo")
    assert done.returncode == 137, done.stderr
    assert "rank 1 failed first: exit code -9 (SIGKILL)" in done.stderr
    assert "killed from outside: out of memory?" in done.stderr


@pytest.mark.slow
def test_members_that_stay_end_with_a_launcher_that_is_killed(place: Place) -> None:
    place.script(LONG)
    with place.begin(*HOSTS, "--strategy", "sync") as process:
        until(lambda: place.logs.count("] step") > 2, lambda: place.output)
        assert len(members(place.folder)) == 2
        process.kill()
        process.wait()
    until(lambda: members(place.folder) == [], lambda: str(members(place.folder)))


@pytest.mark.slow
def test_status_logs_scale_and_stop(place: Place) -> None:
    place.script(LONG)
    with place.begin("-n", "1:2", "--hosts", "a:1,b:1") as process:
        until(lambda: "] step 10" in place.logs, lambda: place.output)
        shown = place.paceline("status", "it").stdout
        assert "host a: up, 1 of 1 slot in use" in shown
        assert "host b: up" in shown
        scaled = place.paceline("scale", "it", "1")
        assert scaled.returncode == 0, scaled.stderr
        until(lambda: "has left" in place.output, lambda: place.output)
        done = place.paceline("stop", "it")
        assert done.returncode == 0, done.stdout + done.stderr
        assert process.wait(LIMIT_S) == 143, place.output
    assert agents(place.folder) == []


@pytest.mark.slow
def test_agents_end_with_a_launcher_that_is_killed(place: Place) -> None:
    place.script(LONG)
    with place.begin(*HOSTS) as process:
        until(lambda: "] step 10" in place.logs, lambda: place.output)
        assert len(agents(place.folder)) == 2
        process.kill()
        process.wait()
    until(lambda: agents(place.folder) == [], lambda: str(agents(place.folder)))


@pytest.mark.slow
def test_a_host_that_is_lost_is_its_members_lost(place: Place) -> None:
    place.script(LONG)
    with place.begin("-n", "1:2", "--hosts", "a:1,b:1", "--replacements", "3", "--silence-s", "1") as process:
        until(lambda: "] step 10" in place.logs, lambda: place.output)
        place.servers.stop("b")  # so that its agent cannot be started again
        (lost,) = [pid for pid in agents(place.folder) if "b" in words_of(pid)]
        os.kill(lost, signal.SIGKILL)
        until(lambda: "the agent of host b ended" in place.output, lambda: place.output)
        until(lambda: "host b is not heard any more" in place.output, lambda: place.output)
        before = place.logs.count("step")
        until(lambda: place.logs.count("step") > before + 5, lambda: place.output)
        place.servers.start("b")
        until(lambda: "host b is back" in place.output or "joined: 2 members" in place.output, lambda: place.output)
        place.paceline("stop", "it", "--kill")
        process.wait(LIMIT_S)


@pytest.mark.slow
def test_a_detached_run_goes_on_without_the_connections(place: Place) -> None:
    place.script(LONG)
    done = place.run(*HOSTS, "--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run it goes on without this terminal" in done.stdout
    try:
        until(lambda: "] step 10" in place.logs, lambda: place.logs)
        run = record.read(place.folder / "runs" / "it")
        assert run
        assert os.getsid(run.pid) != os.getsid(0)
        before = agents(place.folder)
        for pid in ssh_clients(place.servers.dir):
            os.kill(pid, signal.SIGKILL)
        steps = place.logs.count("step")
        until(lambda: place.logs.count("step") > steps + 10, lambda: place.logs)
        assert set(before) <= set(agents(place.folder))
    finally:
        stopped = place.paceline("stop", "it")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    until(lambda: agents(place.folder) == [], lambda: str(agents(place.folder)))
    assert "the members (again: kill them)" in (place.folder / "runs" / "it" / "logs" / "launcher.log").read_text()


def test_a_detached_run_that_cannot_start_says_so(place: Place) -> None:
    place.servers.stop("b")
    assert "host b: nothing listens there" in place.refused(*HOSTS, "--detach")


# ---- parts


def test_what_is_said_of_a_failure_that_nobody_knows() -> None:
    way = SecureShell(python="python3")
    assert way.why("a", 255, "something new\n") == "host a: something new (tried ssh a, exit code 255)"
    assert way.why("a", 255, "closed\n", "hello\n") == "host a: closed (tried ssh a, exit code 255)"
    assert way.why("a", 3, "banner\n", "hi\nnot you\n") == "host a: not you; banner (tried ssh a, exit code 3)"


def test_what_goes_along_by_itself() -> None:
    environ = {"PACELINE_OTHER": "1", "PACELINE_TOKEN": "secret", "PACELINE_RANK": "0", "HOME": "/root"}
    assert ssh._carried(environ) == {"PACELINE_OTHER": "1"}


def test_who_sits_where() -> None:
    spec = JobSpec(script="train.py", num_members=3, num_servers=2)
    rooms = {"a": Room(2), "b": Room(2), "c": Room(1)}
    assert seats.seats(spec, rooms) == ["a", "a", "b", "a", "b"]
    assert seats.listing(spec, rooms) == ["# host a: rank 0, 1; server 3", "# host b: rank 2; server 4"]


# ---- processes


def words_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def agents(folder: Path) -> list[int]:
    """The agents that work in a folder."""
    return working(folder, "agent")


def members(folder: Path) -> list[int]:
    """The members there, but not what started them."""
    return working(folder, "train.py")


def working(folder: Path, word: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            here = (path / "cwd").resolve() == folder.resolve()
        except OSError:
            continue
        words = words_of(int(path.name))
        if here and word in words and "run" not in words and "bind" not in words:
            found.append(int(path.name))
    return sorted(found)


def ssh_clients(folder: Path) -> list[int]:
    """The ssh processes that use a folder's configuration."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if (words := words_of(pid))[:1] == ["ssh"] and str(folder / "config") in words]


def _environment(folder: Path, torch: str) -> Path:
    """A Python environment with all that this one has, and the metadata of another torch before it."""
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (packages / f"torch-{torch}.dist-info").mkdir(parents=True)
    (packages / f"torch-{torch}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {torch}\n")
    (packages / "all.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    return folder / "bin" / "python"


def test_a_ctrl_c_is_heard_while_hosts_are_asked(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    silent = tmp_path / "ssh"  # it gets there, and nobody answers
    named = "case \"$*\" in *' -G '*) echo hostname 127.0.0.1; exit;; esac"
    silent.write_text(f"#!/bin/sh\n{named}\n> {tmp_path}/asked\nexec sleep 600\n")
    silent.chmod(0o755)
    words = [sys.executable, "-m", "paceline", "run", "-n", "2", "--hosts", "a,b", "--ssh", str(silent), "train.py"]
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        until(lambda: (tmp_path / "asked").exists())
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (130, "")  # and not that there was no answer
    assert not (tmp_path / "runs").exists()
