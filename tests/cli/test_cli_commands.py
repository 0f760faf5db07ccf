"""The commands around a run: help, version, status, doctor."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline.cli import flags, status, torch_checks
from paceline.cli.runs import Known
from paceline.cli.status import describe
from paceline.core.settings import NAMES, Settings
from paceline.core.status import Doing, Status
from paceline.environment import this_host
from paceline.launch.record import Run
from paceline.testing.cluster import Cluster

PACELINE = [sys.executable, "-m", "paceline"]


def paceline(*args):
    return subprocess.run([*PACELINE, *args], capture_output=True, text=True, timeout=60)


def test_help_version_and_typing_errors():
    assert "paceline run -n 2 train.py" in paceline("--help").stdout
    assert paceline().returncode == 2
    assert re.fullmatch(r"paceline \d+\.\d+\.\d+\n", paceline("--version").stdout)
    assert "unknown command 'rnu': did you mean 'run'?" in paceline("rnu").stderr
    for command in ("run", "status", "plan", "doctor"):
        done = paceline(command, "--help")
        assert (done.returncode, done.stdout[:5]) == (0, "usage")
    assert "unknown option '--al': did you mean '--all'?" in paceline("status", "--al").stderr
    assert "unknown option '--jsn': did you mean '--json'?" in paceline("doctor", "--jsn").stderr


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["run", "--help"],
        ["plan", "--help"],
        ["run", "-n", "2", "--dry-run", "x.py"],
        ["status"],
        ["doctor"],
    ],
)
def test_torch_is_not_imported(args, tmp_path):
    (tmp_path / "x.py").write_text("")
    code = (
        "import sys; from paceline.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, *args], cwd=tmp_path, capture_output=True).returncode == 0


def test_help_is_quick():
    def cpu_s():
        before = os.times()
        paceline("--help")
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    # About 0.06 s. Time of the processor, not of the clock, which others' load would lengthen.
    assert min(cpu_s() for _ in range(5)) < 0.15


def test_every_setting_has_one_flag():
    assert sorted(f.field for f in flags.SETTINGS) == sorted(NAMES)
    text = paceline("run", "--help").stdout
    for flag in flags.SETTINGS:
        assert text.count(f"\n  {flag.option}") == 1


def test_flags_become_settings():
    parser = flags.Parser(prog="x")
    flags.add_settings(parser)
    text = (
        "--strategy async --servers 3 --codec sign --precision bf16 --mesh shard=2 --name a --root r --fresh --seed 1 "
        "--device cuda:1 --transport gloo --progress off --checkpoint-every-s 0 --checkpoint-keep 0 --join-limit-s 1.5 "
        "--wait-limit-s 2 --check-finite --lr-rule sqrt --stragglers less"
    )
    args = shlex.split(text)
    settings = flags.settings_of(parser.parse_args(args))
    assert sorted(settings.pinned) == sorted(NAMES)
    assert settings == Settings(
        pinned=settings.pinned,
        strategy="async",
        servers="3",
        codec="sign",
        precision="bf16",
        mesh="shard=2",
        name="a",
        root="r",
        fresh=True,
        seed=1,
        device="cuda:1",
        transport="gloo",
        progress="off",
        checkpoint_every_s=0,
        checkpoint_keep=0,
        join_limit_s=1.5,
        wait_limit_s=2,
        lr_rule="sqrt",
        stragglers="less",
        check_finite=True,
    )
    assert flags.settings_of(parser.parse_args([])) == Settings()
    assert flags.settings_of(parser.parse_args(["--seed", "0"])).pinned == ("seed",)


MEMBERS = """
    import os, sys, time
    from pathlib import Path
    from paceline.core.status import Status
    rank = int(os.environ["PACELINE_RANK"])
    if rank != 2:
        status = Status(Path(sys.argv[1]) / "status" / f"rank-{rank}")
        status.epoch, status.step = 3, 40 + rank
        status.set("waiting for member 1 (gradients)" if rank == 0 else "computing")
    print("up", flush=True)
    time.sleep(60)
"""


def test_nobody_is_said_to_wait_for_a_process_that_has_ended(tmp_path):
    """With servers too, whose run goes on without a worker; here the third is the server."""
    run = Run(name="x", command=[], size=3, pid=os.getpid(), host=this_host(), started=time.time())
    words = ["waiting for the servers", "computing", "serving: 7 pushes applied"]
    said = [Doing(rank, 1, 4, 0, time.time(), what) for rank, what in enumerate(words)]
    marked = {}
    for gone in (None, 1, 2):
        states = ["gone" if rank == gone else "alive" for rank in range(3)]
        table = status._table(Known(tmp_path, run, time.time(), said, states))[2:]
        marked[gone] = [rank for rank, line in enumerate(table) if "the others wait for this one" in line]
    assert marked == {None: [1, 2], 1: [2], 2: [1]}


def test_status_of_members_alive_hung_and_dead(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(root=str(tmp_path / "runs"), name="x")
    with Cluster(3, notice_s=0.1).start(MEMBERS, [str(tmp_path / "runs/x")], settings=settings) as running:
        for rank in range(3):
            running.wait_for(rank, "up")
        lines = paceline("status", "x").stdout.splitlines()
        assert re.match(rf"runs/x: running for .* \(launcher: process {os.getpid()}\), 3 members", lines[0])
        assert lines[1].split() == ["rank", "state", "process", "epoch", "step", "doing"]
        zero = rf" *0 +alive +{running.pid(0)} +4 +40 +waiting for member 1 \(gradients\), for \d+\.\d s"
        one = rf" *1 +alive +{running.pid(1)} +4 +41 +computing, for \d+\.\d s  <- the others wait for this one"
        assert re.fullmatch(zero, lines[2])
        assert re.fullmatch(one, lines[3])
        assert re.fullmatch(rf" *2 +alive +{running.pid(2)} +- +- +starting: has not joined", lines[4])

        running.kill(1, signal.SIGSTOP)
        time.sleep(0.1)
        line = paceline("status").stdout.splitlines()[3]  # the newest
        assert re.search(r"1 +stopped .*<- the others wait for this one", line)

        running.kill(1, signal.SIGKILL)
        running.outcome(20)
    lines = describe(Path("runs/x"))
    assert re.match(r"runs/x: ended with exit code 137 after .* ago, 3 members", lines[0])
    for line in lines[2:4]:
        assert re.search(r"gone .*last: .* ago", line)
    assert "nothing heard of it" in lines[4]
    assert re.match(r"x +3 members +ended with exit code 137", paceline("status", "--all").stdout)


def test_status_of_a_run_whose_launcher_was_killed(tmp_path):
    (tmp_path / "train.py").write_text("print('up'); import time; time.sleep(60)")
    launcher = subprocess.Popen([*PACELINE, "run", "-n", "1", "train.py"], cwd=tmp_path, stdout=subprocess.PIPE)
    launcher.stdout.readline()
    launcher.kill()
    launcher.communicate()
    done = subprocess.run([*PACELINE, "status"], cwd=tmp_path, capture_output=True, text=True)
    assert "not running: its launcher was killed" in done.stdout


ALONE = """
    import sys
    from paceline.core.settings import Settings
    from paceline.train.join import join
    run = join(name="solo", progress="off")
    print("joined", flush=True)
    if sys.stdin.readline() == "fail\\n":
        raise ValueError("no")
"""


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Starts a script without `paceline run`; what it is told decides how it ends."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(ALONE))
    started = []

    def start(*command):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen([sys.executable, *command, "train.py"], **pipes, text=True))
        while "joined" not in (line := started[-1].stdout.readline()):
            assert line, started[-1].stderr.read()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_status_of_a_run_that_was_started_without_a_launcher(alone):
    one = alone()
    lines = paceline("status").stdout.splitlines()
    assert re.fullmatch(r"runs/solo: running for \d+\.\d s \(not by paceline run\), 1 member", lines[0])
    assert re.fullmatch(rf" *0 +alive +{one.pid} +1 +0 +\w+, for \d+\.\d s", lines[2])
    one.communicate("end\n")
    assert re.match(r"runs/solo: finished after .* ago, 1 member", describe(Path("runs/solo"))[0])
    assert re.match(r"solo +1 member +finished after", paceline("status", "--all").stdout)

    # Started by paceline run, and again without it: what the launcher wrote is of the time before.
    Cluster(2).run("pass", settings=Settings(root="runs/", name="solo"))
    assert re.match(r"runs/solo: finished after .*, 2 members", describe(Path("runs/solo"))[0])
    again = alone()
    assert "(not by paceline run), 1 member" in describe(Path("runs/solo"))[0]
    again.communicate("fail\n")
    lines = describe(Path("runs/solo"))
    assert re.match(r"runs/solo: failed after .* ago, 1 member", lines[0])
    assert re.search(r"gone .* last: failed: ValueError: no, ", lines[2])
    killed = alone()
    killed.kill()
    killed.wait()
    assert describe(Path("runs/solo"))[0] == "runs/solo: not running: its members were killed, 1 member"


def test_status_of_a_run_under_torchrun(alone):
    stale = Path("runs/solo/status/rank-5")
    Status(stale).set("training")  # of a start with more members
    launcher = alone("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    lines = paceline("status").stdout.splitlines()
    assert "(not by paceline run), 2 members" in lines[0]
    assert [line.split()[:2] for line in lines[2:]] == [["0", "alive"], ["1", "alive"]]
    launcher.communicate("end\n", timeout=30)  # the end of its input ends both members


def test_a_member_on_another_host_is_elsewhere(tmp_path):
    Status(tmp_path / "status/rank-0", "far-away").set("training")
    lines = describe(tmp_path)
    assert "on other hosts, 1 member" in lines[0]
    assert re.search(r"0 +elsewhere .* training, for", lines[2])


def test_status_of_a_run_that_was_left_early(tmp_path):
    Status(tmp_path / "status/rank-0").set("left early")
    assert re.search(r": left early after .* ago, 1 member", describe(tmp_path)[0])


def test_status_names_who_was_slow_lately(tmp_path):
    Status(tmp_path / "runs/x/status/rank-0").set("training")
    (tmp_path / "runs/x/events").mkdir()
    slow = {"kind": "straggler", "member": 2, "times": 2.0, "reason": "load", "text": "takes long", "step": 20}
    told = [slow | {"done": "told"}, slow | {"done": "asked to leave", "step": 120}, {"kind": "step", "step": 121}]
    lines = [json.dumps(event) for event in told]
    (tmp_path / "runs/x/events/rank-0.jsonl").write_text("\n".join([*lines, '{"kind": "straggler", "mem']))
    said = paceline("status", "--root", str(tmp_path / "runs"), "x").stdout
    assert said.count("slow: member 2") == 1
    assert "slow: member 2 takes long (step 120; asked to leave)" in said


@pytest.mark.parametrize("words", [["-n", "4"], ["-n", "1"]])
def test_members_are_dropped_only_where_the_run_goes_on_without_them(words, tmp_path):
    done = paceline("run", *words, "--stragglers", "drop", "--root", str(tmp_path), "train.py")
    assert done.returncode == 2
    assert "--stragglers drop: members can leave only a run that goes on without them" in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_is_no_run_is_not_joined():
    """Also where it is longer than the name of a file may be."""
    done = paceline("agent", "--join", "x" * 300)
    assert done.returncode == 2
    assert "xxx': there is no run; give its scheduler.json" in done.stderr


def test_status_of_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there are no runs in 'runs'" in paceline("status").stderr
    Cluster(1).run("pass", settings=Settings(root="runs/", name="digits"))
    done = paceline("status", "digts")
    assert (done.returncode, "there is no run 'digts' in 'runs': did you mean 'digits'?" in done.stderr) == (2, True)


def test_a_process_number_that_was_given_to_another_is_not_alive(tmp_path):
    run = tmp_path / "x"
    (run / "status").mkdir(parents=True)
    from paceline.environment import this_host

    Status(run / "status/rank-0").set("computing")
    data = bytearray((run / "status/rank-0").read_bytes())
    data[32:40] = struct.pack("<d", 1000.0)  # said long before this process began
    (run / "status/rank-0").write_bytes(data)
    host = this_host()
    (run / "run.json").write_text(
        json.dumps({"name": "x", "command": [], "size": 1, "pid": 1, "host": host, "started": 900.0, "members": []})
    )
    assert " gone " in describe(run)[2]


def test_doctor():
    done = paceline("doctor")
    assert done.returncode == 0, done.stdout
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("ok", "warning"))]
    for name in ("cores", "memory", "shared", "loopback", "congestion", "network", "disk", "torch", "gpus", "bfloat16"):
        assert name in names
    assert "a run can start here" in done.stdout


def test_doctor_finds_what_would_stop_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    done = paceline("doctor", "--json", "--root", str(tmp_path / "file/runs"))
    result = json.loads(done.stdout)
    assert (done.returncode, result["ok"]) == (1, False)
    assert [c["name"] for c in result["checks"] if c["level"] == "error"] == ["disk"]


# A torch whose processor claims more than it can.
TORCH = """
import os, signal
__version__ = "2.13.0"
bfloat16 = "bf16"
class version: cuda = None
class cuda: is_available = staticmethod(lambda: False)
class Matrix:
    def __matmul__(self, other): {matmul}
def ones(*sizes, dtype): return Matrix()
"""
DISTRIBUTED = "def is_available(): return True\nis_gloo_available = is_nccl_available = is_available\n"


@pytest.fixture
def torch_is(tmp_path, monkeypatch):
    """Puts another torch in front of the installed one; the levels and words of the doctor's checks of it."""

    def look(source):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch/__init__.py").write_text(source)
        (tmp_path / "torch/distributed.py").write_text(DISTRIBUTED)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        return {check.name: (check.level, check.found, check.means) for check in torch_checks.all_of()}

    return look


def test_doctor_without_torch(torch_is):
    told = torch_is("raise ImportError('libgomp.so.1: cannot open')")
    assert told == {"torch": ("error", "cannot be imported (libgomp.so.1: cannot open)", "pip install torch")}
    told = torch_is("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert "exit code -11 (SIGSEGV)" in told["torch"][1]
    told = torch_is(TORCH.replace("2.13.0", "2.1.0").format(matmul="return [[64]]"))
    assert told["torch"][0] == "error"
    assert "needs 2.11 or later" in told["torch"][2]


def test_doctor_where_bfloat16_does_not_work(torch_is):
    told = torch_is(TORCH.format(matmul="os.kill(os.getpid(), signal.SIGILL)"))
    assert told["torch"][:2] == ("ok", "2.13.0, built for CPU only")
    level, found, means = told["bfloat16"]
    assert (level, found) == ("warning", "a matrix product dies of an illegal instruction")
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in means
    told = torch_is(TORCH.format(matmul="raise RuntimeError('no')"))
    assert told["bfloat16"][:2] == ("warning", "a matrix product fails (exit code 1)")


def test_what_the_doctor_advises_for_bfloat16_helps():
    done = subprocess.run(
        [*PACELINE, "doctor", "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    )
    (check,) = [c for c in json.loads(done.stdout)["checks"] if c["name"] == "bfloat16"]
    assert check["level"] == "ok", check


def test_doctor_on_one_core():
    code = "import os; os.sched_setaffinity(0, {0})\nfrom paceline.cli.checks import check_cores; print(check_cores())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "level='warning'" in out
    assert "take turns" in out
