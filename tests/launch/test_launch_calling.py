"""`paceline.launch`: functions on members that are real processes, from scripts, from what was typed, and from here."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import paceline
from paceline.core.errors import ConfigError, MemberFailed, PacelineError, TimedOut
from paceline.launch import parcels

ENV = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    yield tmp_path
    assert not list(temporary.iterdir())  # however it ended


def rank():
    return int(os.environ["PACELINE_RANK"])


def python(source, *args, name="script.py", limit_s=120):
    """Run it as a script; as typed, where it has no name."""
    source = textwrap.dedent(source)
    if name:
        Path(name).write_text(source)
    command = [sys.executable, name or "-", *args]
    text = None if name else source
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=limit_s, env=ENV)


# ---- what comes back


def test_results_come_in_the_order_of_ranks(capfd):
    def work(base, step):
        print("hello from", rank())
        time.sleep(0.3 * (rank() == 0))
        return base + step * rank()

    assert paceline.launch(work, 10, 5, workers=3) == [10, 15, 20]
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{r}] hello from {r}" for r in range(3)]


def test_what_is_not_shown_is_in_the_logs(capfd, here):
    paceline.launch(lambda: print("quiet"), workers=1, show=False, name="calm")
    assert capfd.readouterr().out == ""
    assert (here / "runs/calm/logs/rank-0.log").read_text() == "quiet\n"


def test_lambdas_closures_partials_and_what_is_imported():
    base = {"a": [1, 2]}
    assert paceline.launch(lambda: base, workers=1) == [base]
    assert paceline.launch(functools.partial(divmod, 7), 2, workers=2) == [(3, 1)] * 2
    assert paceline.launch(os.path.join, "a", "b", workers=1) == ["a/b"]


@pytest.mark.parametrize("name", ["script.py", ""])
def test_functions_and_classes_of_main(name):
    """Of a script, which has no guard and needs none, and of what was typed."""
    done = python(
        """
        import dataclasses, os, paceline

        SCALE = 3

        @dataclasses.dataclass
        class Point:
            x: int

        def scaled(x):
            return x * SCALE

        def work(x):
            return Point(scaled(x) + int(os.environ["PACELINE_RANK"]))

        points = paceline.launch(work, 2, workers=2)
        assert points == [Point(6), Point(7)], points
        assert type(points[0]) is Point
        print("done", paceline.launch)
        """,
        name=name,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done <module 'paceline.launch'")


def test_modules_beside_a_script_are_found(here):
    (here / "apart").mkdir()
    (here / "apart/helper.py").write_text("def double(x):\n    return 2 * x\n")
    done = python(
        "import helper, paceline\nprint(paceline.launch(helper.double, 4, workers=1), paceline.launch(lambda: "
        "helper.double(5), workers=1))",
        name="apart/script.py",
    )
    assert done.stdout == "[8] [10]\n", done.stderr


def test_members_join_and_train_together(capfd):
    def train(steps):
        import torch

        run = paceline.join(progress="off")
        torch.manual_seed(run.rank)
        model = torch.nn.Linear(3, 1)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        return run.rank, run.size, run.seed, run.settings.strategy, model.weight

    told = paceline.launch(train, 3, workers=2, seed=5, checkpoint_keep=0)
    assert [row[:4] for row in told] == [(0, 2, 5, "allreduce"), (1, 2, 5, "allreduce")]
    assert told[0][4].equal(told[1][4])
    assert told[0][4].requires_grad


@pytest.mark.slow
def test_members_with_servers():
    def train():
        import torch

        run = paceline.join(progress="off")
        model = torch.nn.Linear(3, 1)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        data = torch.utils.data.TensorDataset(torch.randn(32, 3))
        for _ in run.epochs(1):
            for (x,) in run.loader(data, batch_size=4):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return run.settings.strategy

    assert paceline.launch(train, workers=2, strategy=paceline.Async()) == ["async"] * 2


# ---- what goes wrong


def test_an_error_is_the_members_own_with_its_traceback(here):
    def inner(text):
        raise KeyError(text)

    def work():
        if rank() == 1:
            inner("which")
        time.sleep(60)

    with pytest.raises(KeyError, match="which") as caught:
        paceline.launch(work, workers=2, name="bad", show=False)
    cause = caught.value.__cause__
    assert isinstance(cause, MemberFailed)
    assert cause.rank == 1
    assert str(cause).startswith("member 1 of 2 failed (runs/bad/logs/rank-1.log):\n\nTraceback")
    assert 'inner("which")' in str(cause)  # the line of source, in this file
    assert "called.py" not in str(cause)
    assert caught.value.__notes__ == [
        "raised by member 1 of 2; its traceback is above, its whole output in runs/bad/logs/rank-1.log"
    ]


def test_an_error_that_cannot_be_sent_is_told_in_text():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__("odd one")

    def work():
        raise Odd(1, 2)

    with pytest.raises(MemberFailed, match=r"(?s)member 0 of 1 failed.*raise Odd\(1, 2\).*Odd: odd one"):
        paceline.launch(work, workers=1, show=False)


def test_a_traceback_shows_what_was_typed_in_a_notebook():
    done = python(
        """
        import linecache, paceline
        cell = "def work():\\n    raise ValueError('typed')\\n"
        linecache.cache["<cell 7>"] = (len(cell), None, cell.splitlines(True), "<cell 7>")  # as IPython does
        exec(compile(cell, "<cell 7>", "exec"))
        try:
            paceline.launch(work, workers=1, show=False)
        except ValueError as error:
            print(error.__cause__)
        """
    )
    assert 'File "<cell 7>", line 2, in work\n    raise ValueError(' in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal 9"),
        (lambda: (print("last", flush=True), os._exit(3)), "ended with exit code 3"),
        (lambda: sys.exit(0), r"ended without a result: did it call sys\.exit\(\)\?"),
        (lambda: sys.exit(4), "ended with exit code 4"),
    ],
)
def test_a_member_that_ends_or_is_killed(work, message):
    with pytest.raises(MemberFailed, match=f"member 0 of 1 {message}") as caught:
        paceline.launch(work, workers=1, show=False)
    assert caught.value.rank == 0


@pytest.mark.slow
def test_who_leaves_is_named_and_not_who_waited():
    def work():
        run = paceline.join(progress="off", wait_limit_s=30)
        if run.rank == 1:
            sys.exit(0)
        run.barrier()

    with pytest.raises(MemberFailed, match="member 1 of 2 ended without a result"):
        paceline.launch(work, workers=2, show=False)


@pytest.mark.slow
def test_a_member_killed_in_training_is_the_one_that_is_named():
    def work():
        run = paceline.join(progress="off", wait_limit_s=30)
        run.barrier()
        if run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run.barrier()

    with pytest.raises(MemberFailed, match="member 1 of 2 was killed by signal 9"):
        paceline.launch(work, workers=2, show=False)


def test_what_cannot_be_sent():
    lock = threading.Lock()
    with pytest.raises(
        ConfigError, match=r"work cannot be sent to the members: .*lock.* make them within the function"
    ):

        def work():
            return lock

        paceline.launch(work, workers=1)
    with pytest.raises(TypeError, match="what member 0 returned, a lock, cannot be sent back"):
        paceline.launch(lambda: threading.Lock(), workers=1, show=False)
    assert len(list(Path("runs").iterdir())) == 1  # the first began none


def test_it_ends_at_its_limit():
    """And so do its members, however far they have come."""
    with pytest.raises(TimedOut, match=r"member 0, 1 had not ended within limit_s=2; logs: runs"):
        paceline.launch(time.sleep, 60, workers=2, limit_s=2)


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_ends_the_members(again, here):
    """Those that listen, and with a second Ctrl-C those that do not."""
    Path("script.py").write_text(
        textwrap.dedent(
            f"""
            import os, signal, sys, tempfile, time, paceline
            tempfile.tempdir = "temporary"
            def work():
                if {again}:
                    signal.signal(signal.SIGTERM, lambda *_: print("asked"))
                print("up", os.getpid())
                while True:
                    time.sleep(1)
            try:
                paceline.launch(work, workers=2)
            except KeyboardInterrupt:
                print("interrupted")
                sys.exit(7)
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, "-u", "script.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV
    ) as script:
        pids = [script.stdout.readline().split()[-1] for _ in range(2)]
        began = time.monotonic()
        script.send_signal(signal.SIGINT)
        if again:
            logs = list(Path("runs").glob("*/logs/rank-*.log"))
            while not all("asked" in log.read_text() for log in logs) and time.monotonic() < began + 60:
                time.sleep(0.05)
            script.send_signal(signal.SIGINT)
        out, err = script.communicate(timeout=60)
    assert (script.returncode, out.splitlines()[-1]) == (7, "interrupted"), err
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_members_end_with_the_process_that_launched_them():
    Path("script.py").write_text(
        "import os, time, paceline\npaceline.launch(lambda: (print('up', os.getpid()), time.sleep(60)), workers=2)"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "script.py"], stdout=subprocess.PIPE, text=True, env=ENV | {"TMPDIR": os.getcwd()}
    ) as script:
        pids = [script.stdout.readline().split()[-1] for _ in range(2)]
        script.kill()
    deadline = time.monotonic() + 5
    while (left := [pid for pid in pids if Path("/proc", pid).exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


# ---- where it may not be used


def test_within_a_member_it_is_refused():
    def work():
        paceline.launch(print, workers=2)

    with pytest.raises(ConfigError, match=r"this process is one already: member 0 of 1, started by paceline run or"):
        paceline.launch(work, workers=1, show=False)


def test_under_paceline_run_it_is_refused():
    Path("script.py").write_text("import paceline\npaceline.launch(print, workers=2)")
    command = [sys.executable, "-m", "paceline", "run", "-n", "1", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENV)
    assert done.returncode == 1
    assert "start the script as plain `python script.py`" in done.stderr


def test_under_torchrun_it_is_refused(monkeypatch):
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="member 1 of 2, started by torchrun"):
        paceline.launch(print, workers=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "workers=0: give a whole number of at least 1"),
        ({"workers": True}, "workers=True"),
        ({"workers": 2.0}, "workers=2.0"),
        ({"workers": 1, "limit_s": 0}, "limit_s=0: give a number of seconds above 0"),
        ({"workers": 1, "limit_s": "3"}, "limit_s='3': give a number of seconds above 0"),
        ({"workers": 1, "threads": 0}, "threads=0"),
        ({"workers": 1, "sed": 3}, "unknown setting 'sed': did you mean 'seed'?"),
        ({"workers": 1, "name": "a/b"}, "name 'a/b': use up to 200 letters"),
        ({"workers": 1, "strategy": "alreduce"}, "unknown strategy 'alreduce': did you mean 'allreduce'?"),
        ({"workers": 2, "strategy": "zero", "mesh": "shard=2"}, "--mesh shard=2 does not go with --strategy zero"),
        ({"workers": 1, "precision": "bf61"}, "unknown precision 'bf61'"),
        ({"workers": 1, "progress": "on"}, "unknown progress 'on'"),
        ({"workers": 3, "mesh": "shard=2"}, "shard=2"),
        ({"workers": 2, "lr_rule": "linear"}, "--lr-rule linear"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(given, message, here):
    with pytest.raises(ConfigError) as caught:
        paceline.launch(print, **given)
    assert message in str(caught.value)
    assert not (here / "runs").exists()


def test_a_function_is_needed():
    with pytest.raises(ConfigError, match=r"launch\(3\): give a function"):
        paceline.launch(3, workers=1)
    with pytest.raises(TypeError, match="workers"):
        paceline.launch(print)


class OnlyThere:
    """What a member can make, and whoever waits for it cannot."""

    def __reduce__(self):
        return _made, ()


class OnlyThereError(RuntimeError):
    def __reduce__(self):
        return _made, ()


def _made():
    if "PACELINE_RANK" not in os.environ:
        raise ConfigError("no such thing here")
    return OnlyThereError("made")


class Ending:
    def __reduce__(self):
        return _leave, ()


def _leave():
    if "PACELINE_RANK" not in os.environ:
        sys.exit("somebody's word")
    return Ending()


def test_a_result_that_ends_who_makes_it():
    with pytest.raises(MemberFailed, match=r"what member 0 of 1 returned, a.* Ending, .*: SystemExit: somebody's word"):
        paceline.launch(Ending, workers=1)


def test_a_result_that_cannot_be_made_here():
    """Neither what pickle says of it, nor where in us that was."""
    with pytest.raises(MemberFailed) as failed:
        paceline.launch(lambda: (7, OnlyThere()) if rank() else 1, workers=2)
    assert failed.value.rank == 1
    said = str(failed.value)
    assert said.startswith(
        "what member 1 of 2 returned, a tuple of int and OnlyThere, cannot be made again here: ConfigError: no such "
        "thing here ("
    )
    assert f"{__file__}, line " in said
    assert said.endswith("; return plain values, arrays or tensors")
    assert failed.value.__cause__ is failed.value.__context__ is None


def test_a_result_of_a_module_that_only_members_find(here):
    (here / "there").mkdir()
    (here / "there/apart.py").write_text("class Thing:\n    pass\n")

    def work():
        sys.path.append("there")
        import apart

        return apart.Thing()

    message = (
        "member 0 of 1 returned, a Thing, cannot be made again here: ModuleNotFoundError: No module named 'apart'; "
    )
    with pytest.raises(MemberFailed, match=message):
        paceline.launch(work, workers=1)


def test_an_error_that_cannot_be_made_here():
    def fail():
        raise OnlyThereError("which")

    with pytest.raises(MemberFailed, match=r"(?s)member 0 of 1 failed \(.*in fail.*OnlyThereError: which"):
        paceline.launch(fail, workers=1)


# ---- what is read is ours


def test_a_parcel_that_others_could_have_written_is_not_read(tmp_path):
    private = tmp_path / "private"
    private.mkdir(0o700)
    file = private / "call"
    parcels.write(file, [1, 2])
    assert file.stat().st_mode & 0o777 == 0o600
    assert parcels.read(file) == [1, 2]
    file.chmod(0o620)
    with pytest.raises(PacelineError, match="is not private to this user"):
        parcels.read(file)
    file.chmod(0o600)
    private.chmod(0o770)
    with pytest.raises(PacelineError, match="is not private to this user"):
        parcels.read(file)
    private.chmod(0o700)
    (private / "link").symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        parcels.read(private / "link")


def test_torch_is_not_imported_for_it():
    done = python("import sys, paceline\npaceline.launch(int, workers=1)\nprint('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr
