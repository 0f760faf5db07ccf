"""Workers of runs with servers are killed and started again: nobody waits for them, and every sample counts once.

The members that are left wait in their second epoch for those who were started again (`--processes`), so that these
take part, however long they take to start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from _served import Result, run_with

from paceline.cli.status import describe
from paceline.core import trained
from paceline.launch.spec import Replacing
from paceline.testing.plan import FaultPlan
from paceline.train.summary import Summary

STRATEGIES = ["async", "bounded(staleness=2)", "sync"]

# As train_counted, but member M of life L (0: the first) kills itself right after its N-th call of something, or takes
# a nap of so many seconds before each; or (torn-K) in its N-th push, of which only server K gets a chunk.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

import paceline
from paceline.testing import train_counted
from paceline.train.feeding import Feeding
from paceline.train.late import Late
from paceline.train.loop import Loop
from paceline.train.run import Run
from paceline.server import messages
from paceline.server.port import Port
from paceline.transport.hub import HubGroup

deaths = sys.argv.pop().split(",")
rank, ledger = os.environ["PACELINE_RANK"], Path(sys.argv[sys.argv.index("--ledger") + 1])
mark = ledger.parent / f"life-{rank}-{os.getpid()}"
life = len(list(ledger.parent.glob(f"life-{rank}-*")))
mark.touch()
places = {
    "join": (paceline, "join"),
    "optimizer": (Run, "optimizer"),
    "enter": (Late, "enter"),
    "restore": (Late, "_restore"),
    "epoch": (Loop, "_enter_epoch"),
    "batch": (Feeding, "_drawn"),
    "step": (Loop, "after_step"),
    "meeting": (HubGroup, "_meet"),
}
begun = False


def nap(call, seconds):
    return lambda *args, **options: (time.sleep(seconds), call(*args, **options))[1]


def watch(name, call, number):
    times = 0

    def watched(*args, **options):
        nonlocal times
        global begun
        result = call(*args, **options)
        begun = begun or name != "meeting"
        times += begun  # meetings are counted from the first epoch on
        if times == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return watched


def tear(server, number):
    say, steps = Port.say, {}

    def torn(port, message, body=None):
        if isinstance(message, messages.Push):
            steps[port.server] = message.step
        if isinstance(message, messages.Part) and port.server != server and steps[port.server] >= number:
            time.sleep(60)
        say(port, message, body)
        if isinstance(message, messages.Part) and port.server == server and steps[server] >= number:
            os.kill(os.getpid(), signal.SIGKILL)

    Port.say = torn


enter = Loop._enter_epoch


def note(*args):
    global begun
    begun = True
    return enter(*args)


Loop._enter_epoch = note
for death in deaths:
    member, of, name, number = death.split(":")
    if member == rank and int(of) == life and name.startswith("torn-"):
        tear(int(name.removeprefix("torn-")), int(number))
    elif member == rank and int(of) == life:
        where, what = places[name]
        call = getattr(where, what)
        setattr(where, what, nap(call, float(number)) if "." in number else watch(name, call, int(number)))
train_counted.main()
"""


def train(
    tmp_path: Path,
    strategy: str,
    plan: FaultPlan | str,
    *,
    members: int = 2,
    processes: int = 0,
    epochs: int = 4,
    step_s: float = 0.02,
    workers: int = 0,
    window: int = 1,
    **options: Any,
) -> Result:
    """With faults of a plan, or with members that kill themselves (`SCRIPT`)."""
    args = ["--epochs", str(epochs), "--samples", "240", "--step-s", str(step_s), "--processes", str(processes)]
    args += ["--workers", str(workers), "--window", str(window)]
    options = {"replacing": Replacing()} | options
    if isinstance(plan, str):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT)
        args, plan, options = [*args, plan], FaultPlan(), options | {"script": str(script)}
    return run_with(tmp_path, strategy, members=members, plan=plan, args=args, **options)


def clean(result: Result, *replaced: int) -> None:
    """The run came to its end, these members were started again, and everything counted once, in the summary too."""
    result.must_be_clean()
    summary = msgspec.json.decode((result.dir / "summary.json").read_bytes(), type=Summary)
    if trained.read(result.dir) and "from the checkpoint" not in result.output:
        assert summary.samples == result.found.samples, result.output
    assert sorted(e.rank for e in result.outcome.replaced) == sorted(replaced), result.output


def killed(*members: int) -> FaultPlan:
    """After seven steps, at any time."""
    plan = FaultPlan()
    for member in members:
        plan = plan.kill(member=member, step=7)
    return plan


def joined(result: Result, member: int, members: int) -> None:
    assert f"[launcher] member {member} joined: {members} members train now" in result.output, result.output


@pytest.mark.slow
def test_a_killed_worker_that_trained_apart_is_replaced(tmp_path: Path) -> None:
    """What it had learnt since its last push is lost, and its batches are dealt again."""
    local = "async_local(every=4, lr=2.0, momentum=0.0)"  # of two workers: differences as they are
    result = train(tmp_path, local, FaultPlan().kill(member=1, step=7), processes=3, epochs=2)
    clean(result, 1)
    joined(result, 1, 2)


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    result = train(tmp_path, "async", FaultPlan().kill(member=1, step=7), processes=3, epochs=2)
    clean(result, 1)
    said = "[launcher] member 1 was killed by signal 9; the others go on; it is started again in 0.5 s (1 of 3)"
    assert said in result.output
    joined(result, 1, 2)
    assert "member 1 was lost (killed by signal 9) and started again" in result.output  # in the summary
    assert any("member 1 was lost (killed by signal 9) and started again" in line for line in describe(result.dir))


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_every_mode(strategy: str, servers: int, tmp_path: Path) -> None:
    result = train(tmp_path, strategy, killed(2), members=3, processes=4, servers=servers)
    clean(result, 2)
    joined(result, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("strategy", ["async", "bounded(staleness=2)"])
def test_a_push_that_one_server_has_is_made_again_for_the_other(
    strategy: str, server: int, again: bool, tmp_path: Path
) -> None:
    replacing = Replacing(replacements=3 if again else 0)
    result = train(tmp_path, strategy, f"1:0:torn-{server}:7", servers=2, processes=3 * again, replacing=replacing)
    clean(result, *[1] * again)
    assert "in the middle of its push" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize("server", [0, 1])
def test_a_torn_push_is_torn_again(server: int, tmp_path: Path) -> None:
    """Both members die in a push, and both of those who replace them."""
    deaths = f"0:0:torn-{server}:5,1:0:torn-{1 - server}:6,0:1:torn-1:3,1:1:torn-0:3"
    result = train(tmp_path, "async", deaths, servers=2)
    clean(result, 0, 0, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("server", [0, 1])
def test_a_torn_push_of_several_batches_is_made_again_among_others(server: int, tmp_path: Path) -> None:
    """Its batches go to the other one, in windows of their own, and count where they are missing alone."""
    replacing = Replacing(replacements=0)
    result = train(tmp_path, "async", f"1:0:torn-{server}:3", servers=2, window=3, epochs=2, replacing=replacing)
    clean(result)


@pytest.mark.slow
@pytest.mark.parametrize("server", [0, 1])
def test_a_torn_push_of_one_that_trained_apart_is_made_again(server: int, tmp_path: Path) -> None:
    local = "async_local(every=4, lr=2.0, momentum=0.0)"
    result = train(tmp_path, local, f"1:0:torn-{server}:3", servers=2, processes=3, epochs=2)
    clean(result, 1)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["enter", "epoch"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_others_train_on_while_one_joins(strategy: str, where: str, tmp_path: Path) -> None:
    """It has opened the tables and takes its time: nobody waits, and its first gradients are of the weights of then."""
    deaths = f"1:0:step:7,1:1:{where}:1.0"
    result = train(tmp_path, strategy, deaths, processes=3, step_s=0.1, servers=2)
    clean(result, 1)
    joined(result, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_worker_too(strategy: str, tmp_path: Path) -> None:
    result = train(tmp_path, strategy, FaultPlan().kill(member=0, step=7), processes=3)
    clean(result, 0)
    joined(result, 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_at_once(strategy: str, tmp_path: Path) -> None:
    result = train(tmp_path, strategy, killed(1, 2), members=3, processes=5, servers=2)
    clean(result, 1, 2)
    assert result.output.count(" joined: ") == 2, result.output


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_at_once(strategy: str, tmp_path: Path) -> None:
    """What counts is with the servers: whoever comes goes on from there."""
    plan = FaultPlan().kill(member=0, step=12).kill(member=1, step=12)
    result = train(tmp_path, strategy, plan)
    clean(result, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async", "sync"])
@pytest.mark.parametrize("where", ["join", "optimizer", "restore", "epoch", "batch", "step"])
def test_one_that_joins_is_killed_again(where: str, strategy: str, tmp_path: Path) -> None:
    # Whether it writes into the ledger before it dies; in sync its first step waits for the other one.
    writes = where not in ("join", "optimizer") and (where, strategy) != ("step", "sync")
    result = train(tmp_path, strategy, f"1:0:step:7,1:1:{where}:1", processes=3 + writes)
    clean(result, 1, 1)
    joined(result, 1, 2)
    assert "(2 of 3)" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4, 6])
@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_at_the_end_of_an_epoch(strategy: str, member: int, number: int, tmp_path: Path) -> None:
    """In the middle of what members say to each other then: a metric, an agreement on weights, a checkpoint."""
    result = train(tmp_path, strategy, f"{member}:0:meeting:{number}", members=3, processes=4)
    clean(result, member)


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_near_the_end_of_an_epoch_with_fetching_processes(strategy: str, again: bool, tmp_path: Path) -> None:
    """Of the 30 batches of an epoch one of two members had 14, and some more were fetched ahead for it."""
    replacing = Replacing(replacements=3 if again else 0)
    result = train(tmp_path, strategy, "1:0:batch:14", epochs=2, replacing=replacing, workers=2)
    clean(result, *[1] * again)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4])
def test_all_at_the_end_of_an_epoch(number: int, tmp_path: Path) -> None:
    result = train(tmp_path, "async", f"0:0:meeting:{number},1:0:meeting:{number}")
    clean(result, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("step", [25, 29])
def test_at_the_end_of_the_run(step: int, tmp_path: Path) -> None:
    """30 pushes in an epoch: the one who is started again may come too late, and nobody waits for it."""
    result = train(tmp_path, "async", FaultPlan().kill(member=1, step=step), epochs=2)
    result.must_be_clean()


@pytest.mark.slow
def test_the_budget_is_kept(tmp_path: Path) -> None:
    plan = FaultPlan().kill(member=1, step=7)
    result = train(tmp_path, "async", plan, replacing=Replacing(replacements=0))
    clean(result)
    assert "[launcher] member 1 was killed by signal 9; the others go on without it" in result.output


@pytest.mark.slow
def test_with_too_few_the_run_ends(tmp_path: Path) -> None:
    plan = FaultPlan().kill(member=1, step=7)
    result = train(tmp_path, "async", plan, replacing=Replacing(least=2, replacements=0))
    assert result.outcome.code == 137, result.output


@pytest.mark.slow
def test_a_lost_server_still_takes_all_to_the_checkpoint(tmp_path: Path) -> None:
    plan = FaultPlan().kill("server 0", step=40)
    result = train(tmp_path, "async", plan, servers=2)
    clean(result)
    assert "server 0 was lost" in result.output
