"""`paceline run -n MIN:MAX`, `scale` and `status` as a user meets them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from paceline import cli
from paceline.launch import record

PACELINE = [sys.executable, "-m", "paceline"]
# Speaks to the scheduler as a training member does, until there is a file "finish".
MEMBER = """
import os, sys
from paceline.core.errors import Interrupted, TimedOut
from paceline.core.view import Member
from paceline.environment import detect
from paceline.membership.line import Line
from paceline.membership.orders import Arrive

place = detect()
me = Member(rank=place.rank, host=place.host, pid=os.getpid(), id=place.rank)
line = Line(place.scheduler, place.token, Arrive(id=place.rank, member=me), limit_s=20)
if line.standing.view:
    line.ready(0)
number = 0
while not os.path.exists("finish"):
    try:
        new = line.newer(number, 0.1)
    except TimedOut:
        continue
    except Interrupted:
        line.leave("drained")
        sys.exit(0)
    number, ids = new.view.number, [m.id for m in new.view.members]
    print("view", ids)
    line.formed(number, 0)
line.leave("finished")
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')")
    return tmp_path


def paceline(*args):
    return subprocess.run([*PACELINE, *args], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "4:2"], "'4:2' has its least above its most: write 2:4"),
        (["-n", "0:2"], "'0:2' is not MIN:MAX in whole numbers of at least 1, such as 2:4"),
        (["-n", ":"], "':' is not MIN:MAX"),
        (["-n", "2:"], "'2:' is not MIN:MAX"),
        (["-n", "1:2:3"], "'1:2:3' is not MIN:MAX"),
        (["-n", "2:x"], "'2:x' is not MIN:MAX"),
        (["-n", "2:4", "--strategy", "async", "--slots", "1"], "--slots is for elastic runs of all-reduce: with"),
        (["-n", "4", "--strategy", "sync", "--standbys", "2"], "lost workers are started again on this host"),
        (["-n", "2:4", "--strategy", "async", "--servers", "colocated"], "so a lost one cannot be replaced"),
        (["-n", "2:4", "--transport", "gloo"], "-n MIN:MAX does not go with --transport gloo: torch's groups"),
        (["-n", "2:4", "--transport", "nccl"], "leave --transport at auto"),
        (["-n", "2:4", "--servers", "2"], "-n MIN:MAX does not go with --servers 2"),
        (["-n", "4", "--replacements", "2"], "--replacements is for runs whose members may come and go: give -n"),
        (["-n", "4", "--silence-s", "2"], "give -n MIN:MAX, such as -n 4:4"),
        (["-n", "4", "--strategy", "sync", "--silence-s", "2"], "leave it out, or give --replacements"),
        (["-n", "2:4", "--silence-s", "0"], "'0' is not a number of seconds of at least 0.1"),
        (["-n", "2:4", "--replacements", "-1"], "'-1' is not a whole number of at least 0"),
        (["-n", "2:4", "--hosts", ""], "--hosts: '' names no host"),  # an empty variable of a shell
        (["-n", "2:4", "--port", "99999"], "--port: '99999' is no port: they end at 65535"),
        (["-n", "2:4", "--hosts", "a:4", "--start-on", ""], "--start-on: '': say what is called"),
        (["-n", "2", "--hosts", "a:2", "--ssh", ""], "--ssh: '': say what is called"),
        (["-n", "2", "--hosts", "a:2", "--ssh", "ssh 'a"], "no closing quotation"),
        (["-n", "2", "--on", "mpi", "--mpirun", "mpirun 'a"], '--mpirun: "mpirun \'a": no closing quotation'),
        (["-n", "2", "--on", "slurm", "--sbatch=--qos='a"], '--sbatch: "--qos=\'a": no closing quotation'),
        (["-n", "2", "--on", "torchrun", "--master-port", "65535"], "they end at 65534"),  # the next one is needed
    ],
)
def test_what_cannot_be_elastic(capsys, options, message):
    assert cli.main(["run", *options, "train.py"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_port_in_use_and_an_address_of_another_host_are_told_before_anything_starts(here):
    """A scheduler that cannot listen would be started again and again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = paceline("run", "-n", "1:2", "--port", str(port), "train.py")
    assert done.returncode == 2
    assert f"--port {port}: cannot listen at 127.0.0.1:{port} (Address already in use); give another" in done.stderr
    done = paceline("run", "-n", "1:2", "--listen", "203.0.113.9", "train.py")
    assert done.returncode == 2
    assert "--listen 203.0.113.9: cannot listen there (Cannot assign requested address); give an" in done.stderr
    assert "lo (127.0.0.1)" in done.stderr
    assert not (here / "runs").exists()


def test_what_would_be_started(capsys):
    assert cli.main(["run", "-n", "2:3", "--dry-run", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall("PACELINE_SCHEDULER=", shown)) == 3
    assert "PACELINE_RENDEZVOUS" not in shown


def test_what_would_be_started_with_slots_for_some(capsys):
    options = ["-n", "2:3", "--slots", "1", "--listen", "127.0.0.1", "--dry-run"]
    assert cli.main(["run", *options, "train.py"]) == 0
    shown = capsys.readouterr().out
    assert "# 1 of the 3 members have a slot here (--slots)" in shown
    assert len(re.findall("PACELINE_SCHEDULER=", shown)) == 1


def test_status_of_an_elastic_run_waits_for_nobody_who_has_left():
    Path("train.py").write_text(
        """
import os, time
from pathlib import Path
from paceline.core.status import Status
rank = int(os.environ["PACELINE_RANK"])
status = Status(Path(f"runs/x/status/rank-{rank}"))
status.set("waiting for members: 1 of at least 2" if rank == 0 else "finished")
print("up")
if rank == 0:
    time.sleep(60)
"""
    )
    launcher = subprocess.Popen(
        [*PACELINE, "run", "-n", "2:2", "--name", "x", "--standbys", "0", "train.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(launcher, "up", times=2)
        shown = paceline("status", "x").stdout
        while not re.search("1 +gone", shown):
            shown = paceline("status", "x").stdout
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=20)
    assert "waiting for members: 1 of at least 2" in shown
    assert "the others wait" not in shown


def test_the_help_names_it(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    shown = capsys.readouterr().out
    for word in ("MIN:MAX", "--replacements N", "--silence-s S", "--standbys K", "paceline run -n 2:4 train.py"):
        assert word in shown


def test_scaling_what_cannot_be_scaled(capsys):
    assert paceline("run", "-n", "1", "--name", "fixed", "train.py").returncode == 0
    assert cli.main(["scale", "fixed", "2"]) == 2
    assert "run 'fixed' has a fixed number of members: start it with -n MIN:MAX" in capsys.readouterr().err
    assert cli.main(["scale", "fixde", "2"]) == 2
    assert "did you mean 'fixed'?" in capsys.readouterr().err


def test_a_script_that_never_joins(capfd):
    done = paceline("run", "-n", "1:2", "--name", "plain", "train.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] hello", "[1] hello"])
    assert "the script never called paceline.join(), so 2 independent copies of it ran" in done.stderr
    assert cli.main(["scale", "plain", "2"]) == 2
    assert "run 'plain' is not running: finished" in capfd.readouterr().err


def test_losing_scaling_looking_and_finishing():
    Path("train.py").write_text(MEMBER)
    command = [*PACELINE, "run", "-n", "1:3", "--name", "x", "--standbys", "0", "train.py"]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(launcher, "[0, 1, 2]", times=3)
        os.kill(record.read(Path("runs/x")).members[1], signal.SIGKILL)
        until(launcher, "[0, 2, 1]", times=3)
        status = paceline("status", "x").stdout
        assert "view 3 of 3 members; 3 wanted, 1 to 3 allowed; scheduler's term 1" in status
        assert re.search(r"^ +1 +in .* 1  was killed by signal 9$", status, re.M)
        assert paceline("scale", "x", "2").stdout == "3 to 2 members: member 1 will leave\n"
        until(launcher, "[0, 2]")
        assert "must be between 1 and 3" in paceline("scale", "x", "9").stderr
        Path("finish").touch()
        _, err = launcher.communicate(timeout=20)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 0, err
    assert "3 members (elastic, 1 to 3)" in err
    assert "member 1 was killed by signal 9; the others go on; it is started again in 0.5 s (1 of 3)" in err
    assert "member 1 joined: 3 members train now" in err
    assert "a member was lost on the way, and the run finished: 1: killed by signal 9 (runs/x/logs/rank-1.log)" in err
    assert re.search(r"^member 1 was lost \(killed by signal 9\), .* ago$", paceline("status", "x").stdout, re.M)


def test_a_run_whose_launcher_was_killed_is_not_asked():
    Path("train.py").write_text(MEMBER)
    command = [*PACELINE, "run", "-n", "1:1", "--name", "x", "--standbys", "0", "train.py"]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(launcher, "[0]")
    finally:
        launcher.kill()
        launcher.communicate()
    for words in (["scale", "x", "1"], ["stop", "x"]):
        done = paceline(*words)
        assert (done.returncode, done.stderr.count(": its launcher was killed")) == (2, 1), done.stderr
    assert "scheduler" not in paceline("status", "x").stdout


def test_where_nobody_could_be_started_the_script_is_not_blamed():
    Path("hosts.txt").touch()
    options = ["--hosts", "hosts.txt", "--start-on", "env HOST={host}", "--listen", "127.0.0.1", "--join-limit-s", "1"]
    done = paceline("run", "-n", "1:2", *options, "train.py")
    assert done.returncode == 1
    assert "the run is over: fewer than 1 members can go on: no host has a free slot" in done.stderr
    assert "paceline.join()" not in done.stderr


def test_sigterm_drains():
    Path("train.py").write_text(MEMBER)
    command = [*PACELINE, "run", "-n", "1:2", "--name", "x", "--standbys", "0", "train.py"]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(launcher, "[0, 1]", times=2)
        launcher.terminate()
        _, err = launcher.communicate(timeout=20)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 143
    assert "draining the members (again: kill them)" in err
    assert "stopped by SIGTERM; to go on: paceline run --name x" in err or "--name x" in err


def until(launcher, text, times=1, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while times:
        assert time.monotonic() < deadline
        line = launcher.stdout.readline()
        assert line, launcher.stderr.read()
        times -= text in line


LEAVES = """
    import sys, time, torch, paceline
    run = paceline.join(progress="off", checkpoint_keep=0)
    model = torch.nn.Linear(2, 1)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    data = torch.utils.data.TensorDataset(torch.randn(240, 2))
    loader = run.loader(data, batch_size=8)
    me, (leaver, code) = run.rank, map(int, sys.argv[1:])
    for epoch in run.epochs(2):
        for (x,) in loader:
            time.sleep(0.02)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if run.step == 5 and leaver in (me, 9):
                sys.exit(code)
"""


@pytest.mark.parametrize("leaver", [1, 9], ids=["one", "all"])
def test_a_script_that_ends_with_code_0_before_the_run_does_is_not_started_again(leaver):
    """All of them: as where training is stopped early."""
    Path("train.py").write_text(textwrap.dedent(LEAVES))
    done = paceline("run", "-n", "1:2", "--name", "x", "--standbys", "0", "train.py", str(leaver), "0")
    assert done.returncode == 0, done.stderr
    assert "started again" not in done.stderr
    summary = msgspec.json.decode(Path("runs/x/summary.json").read_bytes())
    if leaver == 1:
        assert "member 1 left: its script ended before the run did; 1 member trains now" in done.stderr
        assert [(m["rank"], m["left"], m["lost"]) for m in summary["members"]] == [(0, False, False), (1, True, False)]
        assert (summary["outcome"], summary["samples"]) == ("finished", 480)
        assert (summary["views"]["lost"], summary["views"]["left"]) == (0, 1)
    else:
        assert (summary["outcome"], summary["samples"]) == ("left early", 80)


def test_nobody_is_said_to_be_started_again_where_the_run_ends():
    source = LEAVES.replace("sys.exit(code)", "raise paceline.core.errors.ConfigError('lr=-1: give more')")
    Path("train.py").write_text(textwrap.dedent(source))
    done = paceline("run", "-n", "1:2", "--name", "x", "--standbys", "0", "train.py", "1", "0")
    assert done.returncode == 1
    assert "the run is over: member 1 ended with an error that would come again: lr=-1: give more" in done.stderr
    assert "started again" not in done.stderr
