"""`paceline run` as a user meets it: real launchers, real members, real signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline.cli import ending
from paceline.core.status import Status
from paceline.launch import record
from paceline.membership.agent import Ended, Outcome

PACELINE = [sys.executable, "-m", "paceline"]
SLEEP = "import time; print('up'); time.sleep(60)"
CHILD = "import os, subprocess, time; print('up', os.getpid(), subprocess.Popen(['sleep', '60']).pid); time.sleep(60)"
STUBBORN = """
    import os, signal, time
    signal.signal(signal.SIGTERM, lambda *_: print("asked"))
    print("up", os.getpid())
    while True:
        time.sleep(1)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(source, name="train.py"):
    Path(name).write_text(textwrap.dedent(source))
    return name


def run(*args, limit_s=60, **env):
    return subprocess.run(
        [*PACELINE, "run", *args], capture_output=True, text=True, timeout=limit_s, env=os.environ | env
    )


@contextlib.contextmanager
def started(*args):
    launcher = subprocess.Popen([*PACELINE, "run", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_the_launcher_does_not_keep_torch_which_only_its_checks_need():
    script = write("""
        import os
        print("torch" if "libtorch" in open(f"/proc/{os.getppid()}/maps").read() else "no torch")
    """)
    done = run("-n", "1", "--strategy", "diloco(every=5)", script)
    assert "no torch" in done.stdout, done.stdout + done.stderr


def wait_for_up(launcher, n):
    """Until n members say up; the other numbers on those lines."""
    numbers = []
    for _ in range(n):
        line = launcher.stdout.readline()
        assert "up" in line, line + launcher.stderr.read()
        numbers += map(int, re.findall(r"\b\d+\b", line.partition("up")[2]))
    return numbers


def gone(pids, limit_s=3.0):
    def alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    deadline = time.monotonic() + limit_s
    while (left := [p for p in pids if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left


def test_output_is_prefixed_and_streams_stay_apart():
    done = run(
        "-n", "2", write("import sys; print('out', sys.argv); print('err', file=sys.stderr)"), "-n", "--x", "y z"
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{r}] out ['train.py', '-n', '--x', 'y z']" for r in (0, 1)]
    assert "[0] err\n" in done.stderr
    assert "[1] err\n" in done.stderr


def test_lines_of_all_members_stay_whole():
    source = """
        import os, sys
        for i in range(300):
            sys.stdout.write(f"<{i} ")
            sys.stdout.write("x" * 500 + ">\\n")
    """
    done = run("-n", "4", write(source))
    for rank in range(4):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] <{i} {'x' * 500}>" for i in range(300)]
    assert len(done.stdout.splitlines()) == 1200


def test_a_module_with_its_arguments():
    write("import sys; print(sys.argv[1:], __name__)", "tool.py")
    done = run("-n", "1", "-m", "tool", "-m", "--y")
    assert done.stdout == "[0] ['-m', '--y'] __main__\n"


def test_the_run_directory():
    run("-n", "2", "--name", "x", write("print('hello')"))
    kept = record.read(Path("runs/x"))
    assert (kept.size, kept.exit_code, kept.name, len(kept.members)) == (2, 0, "x", 2)
    assert kept.finished >= kept.started
    assert Path("runs/x/logs/rank-1.log").read_text() == "hello\n"


def test_who_failed_is_said_in_one_place_at_the_end():
    source = """
        import os, time
        print("line before")
        if os.environ["PACELINE_RANK"] == "1":
            raise ValueError("the reason")
        time.sleep(60)
    """
    done = run("-n", "3", "--name", "x", write(source))
    assert done.returncode == 1
    end = done.stderr[done.stderr.index("paceline: rank 1 failed first: exit code 1, after ") :]
    assert "\n    line before\n" in end
    assert "\n    ValueError: the reason\n" in end
    assert "its whole output: runs/x/logs/rank-1.log\n" in end
    assert "stopped because of it: rank 0, 2" in end
    assert done.stderr.count("failed first") == 1
    assert record.read(Path("runs/x")).exit_code == 1


@pytest.mark.parametrize("leaver", ["0", "1"])
@pytest.mark.parametrize("quick", ["0", "1"])
def test_a_member_that_left_with_exit_code_0_is_named(leaver, quick):
    """Also where the others notice before its process has ended."""
    source = """
        import os, sys, time
        from paceline.core.errors import Interrupted
        rank, leaver, quick = os.environ["PACELINE_RANK"], *sys.argv[1:]
        time.sleep(rank != quick)
        if rank == leaver:
            sys.exit(0)
        raise Interrupted(f"member {leaver} left the run")
    """
    done = run("-n", "2", "--name", "x", write(source), leaver, quick)
    assert done.returncode == 1
    said = f"paceline: rank {leaver} left in the middle of the run: its script ended with exit code 0"
    assert said in done.stderr
    assert f"runs/x/logs/rank-{leaver}.log" in done.stderr
    assert f"rank {1 - int(leaver)} could not go on without it: exit code 1" in done.stderr
    assert "failed first" not in done.stderr


def test_bounded_without_a_staleness_is_refused_before_anything_starts():
    done = run("-n", "2", "--strategy", "bounded", write("print('hello')"))
    assert done.returncode == 2
    assert "Write it as bounded(staleness" in done.stderr
    assert not Path("runs").exists()


def test_a_worker_that_left_while_the_others_finished_is_named(tmp_path):
    for rank, what in enumerate(("left early", "finished", "finished")):
        Status(tmp_path / "status" / f"rank-{rank}").set(what)
    ended = [Ended(rank=rank, code=0, seconds=2.0, tail=(), asked=False, at=1.0) for rank in range(4)]
    logs = {rank: Path(f"{rank}.log") for rank in range(4)}
    (line,) = ending.left_early(Outcome(tuple(ended)), tmp_path, logs, workers=3)
    assert line.startswith("rank 0 left in the middle of the run: its script ended with exit code 0, after 2.0 s; the")
    Status(tmp_path / "status" / "rank-0").set("finished")
    assert ending.left_early(Outcome(tuple(ended)), tmp_path, logs, workers=3) == []


def test_a_killed_member_is_reported_with_a_hint():
    with started("-n", "2", write(CHILD)) as launcher:
        pids = wait_for_up(launcher, 2)
        os.kill(pids[0], signal.SIGKILL)
        _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 137
    assert re.search(r"rank \d failed first: exit code -9 \(SIGKILL\)", err)
    assert "out of memory?" in err
    assert gone(pids)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_stop_all(number, code):
    with started("-n", "2", "--name", "x", write(CHILD)) as launcher:
        pids = wait_for_up(launcher, 2)
        began = time.monotonic()
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=20)
    assert time.monotonic() - began < 4
    assert launcher.returncode == code
    assert gone(pids)
    assert "failed first" not in err
    assert "to go on: paceline run -n 2 --name x train.py" in err
    assert record.read(Path("runs/x")).exit_code == code


def test_a_second_ctrl_c_kills():
    with started("-n", "2", write(STUBBORN)) as launcher:
        pids = wait_for_up(launcher, 2)
        launcher.send_signal(signal.SIGINT)
        assert {launcher.stdout.readline() for _ in range(2)} == {"[0] asked\n", "[1] asked\n"}
        began = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=20)
    assert time.monotonic() - began < 3
    assert launcher.returncode == 130
    assert gone(pids)


def test_a_killed_launcher_leaves_nothing():
    with started("-n", "2", "--name", "x", write(CHILD)) as launcher:
        pids = wait_for_up(launcher, 2)
        assert len(pids) == 4
        launcher.kill()
        launcher.wait()
        assert gone(pids)
    assert not record.is_running(Path("runs/x"))
    assert record.read(Path("runs/x")).exit_code is None
    assert run("-n", "1", "--name", "x", write("pass")).returncode == 0  # so it can go on


def test_the_reader_of_our_output_goes_away():
    write("import time\nfor i in range(200): print('line', i); time.sleep(0.005)\nopen('done', 'w').write('x')")
    shell = f"{' '.join(PACELINE)} run -n 1 --name x train.py | head -n 3; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0"
    assert "Traceback" not in done.stderr
    assert Path("done").exists()
    assert Path("runs/x/logs/rank-0.log").read_text().count("\n") == 200


@pytest.mark.slow
def test_a_reader_that_neither_reads_nor_goes_away():
    write("import os; print('up', os.getpid())\nwhile True: print('x' * 1000)")
    with started("-n", "2", "train.py") as launcher:
        pids = [int(word) for word in re.findall(r"up (\d+)", launcher.stdout.readline())]
        time.sleep(0.5)  # now the pipe is full
        launcher.send_signal(signal.SIGTERM)
        assert gone(pids)
        assert launcher.wait(20) == 143


def test_a_script_that_never_joins_is_a_plain_script():
    done = run("-n", "2", write("print('plain')"))
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] plain", "[1] plain"])
    last = done.stderr.splitlines()[-1]
    assert last.startswith("paceline: the script never called paceline.join(), so 2 independent copies of it ran")
    assert "never called" not in run("-n", "1", "train.py").stderr  # one copy is what was asked for
    assert "never called" not in run("-n", "2", write("import sys; sys.exit(3)")).stderr


def test_a_script_that_joins_is_not_told_to():
    source = """
        import os
        from paceline.core.view import Member
        from paceline.environment import detect
        from paceline.membership import meet
        place = detect()
        meet(place, Member(rank=place.rank, host=place.host, pid=os.getpid()))
    """
    done = run("-n", "2", write(source))
    assert (done.returncode, "never called" in done.stderr) == (0, False)


TRAINS = """
    import sys, torch, paceline
    run = paceline.join()
    model = torch.nn.Linear(2, 1)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = run.loader(torch.utils.data.TensorDataset(torch.ones(6, 2)), batch_size=2)
    steps = 0
    for epoch in run.epochs(int(sys.argv[1])):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            steps += 1
    print("steps", steps)
"""


def test_a_finished_run_goes_on_with_more_epochs():
    write(TRAINS)
    assert "steps 3\n" in run("-n", "1", "--name", "x", "train.py", "1").stdout
    done = run("-n", "1", "--name", "x", "train.py", "3")
    assert "resumed at step 3\n" in done.stderr, done.stderr
    assert "steps 6\n" in done.stdout


def test_one_launcher_at_a_time_holds_a_run():
    write("import sys; sys.exit(int(sys.argv[1]))")
    assert run("-n", "1", "--name", "x", "train.py", "7").returncode == 7
    assert run("-n", "1", "--name", "x", "train.py", "0").returncode == 0
    assert run("-n", "1", "--name", "x", "train.py", "0").returncode == 0
    with started("-n", "1", "--name", "y", write(SLEEP)) as launcher:
        wait_for_up(launcher, 1)
        done = run("-n", "1", "--name", "y", "train.py")
        assert (done.returncode, "run 'y' is already running" in done.stderr) == (2, True)


def test_more_members_than_cores_warns():
    n = len(os.sched_getaffinity(0)) + 1
    done = run("-n", str(n), write("import os; print(os.environ['OMP_NUM_THREADS'])"))
    assert f"warning: {n} members share " in done.stderr
    assert done.stdout.splitlines()[0].endswith("] 1")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0", "train.py"], "-n/--members: '0' is not a whole number of at least 1"),
        (["-n", "abc", "train.py"], "-n/--members: 'abc' is not a whole number of at least 1"),
        (["-n"], "-n/--members: expected one argument"),
        (["train.py"], "how many members? paceline run -n 2 train.py"),
        (["train.py", "-n", "2"], "-n came after the script 'train.py', so it belongs to the script"),
        (["-n", "2"], "which script? paceline run -n 2 train.py"),
        (["-n", "2", "-m"], "which module?"),
        (["-n", "2", "trian.py"], "script 'trian.py' does not exist: did you mean 'train.py'?"),
        (["-n", "2", "--strategy", "alreduce", "train.py"], "unknown strategy 'alreduce': did you mean 'allreduce'?"),
        (["-n", "2", "--startegy=allreduce", "train.py"], "unknown option '--startegy': did you mean '--strategy'?"),
        (["-n", "2", "-x", "train.py"], "unknown option '-x'"),
        (["-n", "2", "--strategy", "allreduce(bucket=8)", "train.py"], "did you mean 'bucket_mb'?"),
        (["-n", "2", "--strategy", "allreduce(bucket_mb=0)", "train.py"], "must be more than 0"),
        pytest.param(
            ["-n", "2", "--device", "cuda:1", "train.py"],
            "device 'cuda:1' was asked for, but this host shows no GPU",
            marks=pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia*"))), reason="this host has a GPU"),
        ),
        (["-n", "2", "--device", "gpu", "train.py"], "unknown device 'gpu': did you mean 'cpu'?"),
        (["-n", "2", "--transport", "mpi", "train.py"], "unknown transport 'mpi'"),
        (["-n", "2", "--seed", "x", "train.py"], "--seed: 'x' is not a whole number of at least 0"),
        (["-n", "2", "--join-limit-s", "nan", "train.py"], "--join-limit-s: 'nan' is not a number of seconds"),
        (["-n", "2", "--wait-limit-s", "0", "train.py"], "--wait-limit-s: '0' is not a number of seconds"),
        (["-n", "2", "--checkpoint-keep", "-1", "train.py"], "--checkpoint-keep"),
        (["-n", "2", "--name", "../x", "train.py"], "--name: name '../x'"),
        (["-n", "2", "--threads", "0", "train.py"], "--threads: '0'"),
        (["-n", "2", "--progress", "loud", "train.py"], "unknown progress 'loud'"),
    ],
)
def test_bad_input_is_one_clear_error_and_starts_nothing(args, message):
    write("open('started', 'w')")
    done = run(*args)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert os.listdir() == ["train.py"]


def test_dry_run_prints_what_would_be_started():
    write("import os; print(os.environ['PACELINE_RANK'], os.environ['OMP_NUM_THREADS'])")
    done = run("-n", "2", "--threads", "3", "--seed", "5", "--dry-run", "train.py", "a b")
    assert done.returncode == 0
    assert os.listdir() == ["train.py"]
    lines = done.stdout.splitlines()
    assert lines[0::2][:2] == ["# rank 0", "# rank 1"]
    assert "PACELINE_TOKEN='<token>'" in lines[1]
    assert "seed=5" in lines[-1]
    pasted = subprocess.run(lines[3], shell=True, capture_output=True, text=True)
    assert pasted.stdout == "1 3\n"


def test_a_member_that_never_arrives_is_named():
    source = """
        import os, time
        from paceline.core.view import Member
        from paceline.environment import detect
        from paceline.membership import meet
        place = detect()
        if place.rank == 1:
            time.sleep(60)
        meet(place, Member(rank=place.rank, host=place.host, pid=os.getpid()))
    """
    done = run("-n", "2", "--join-limit-s", "0.5", write(source))
    assert done.returncode == 1
    assert "rank 0 failed first" in done.stderr
    assert "TimedOut: member 1 of 2 did not arrive within 0.5 s" in done.stderr
