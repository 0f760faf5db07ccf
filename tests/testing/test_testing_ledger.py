"""The ledger: clean where nothing was lost; every kind of loss and doubling is found, in made-up and in real runs."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.launch.local import Local
from paceline.launch.spec import JobSpec
from paceline.testing import train_counted
from paceline.testing.cluster import Cluster
from paceline.testing.counted import Counted, _counted
from paceline.testing.faults import FaultPlan, Faults
from paceline.testing.ledger import Begin, End, Findings, Ledger, Step, Written, path

BEGIN = Begin(samples=24, epochs=2)
WIDTH = 2


def run(members: int = 3, *, counts: bool = True, epochs: int = 2) -> list[Written]:
    """What a run without faults writes: epochs of 24 samples in batches of two per member."""
    written = [Written(member=m, pid=100 + m, begin=BEGIN) for m in range(members)]
    step = 0
    for epoch in range(epochs):
        left = list(range(24))
        while left:
            step += 1
            parts = [[left.pop() for _ in range(min(WIDTH, len(left)))] for _ in range(members)]
            counted = tuple(n for part in parts for n in part) if counts else None
            for w, part in zip(written, parts):
                w.steps.append(
                    Step(step=step, epoch=epoch, samples=tuple(part), counted=counted, weights=f"w{step}", at=step)
                )
    for w in written:
        w.end = End(weights=f"w{step}")
    return written


def change(written: Written, place: int, **values: object) -> None:
    written.steps[place] = msgspec.structs.replace(written.steps[place], **values)


def found(written: list[Written]) -> Findings:
    return Ledger(written).check()


def kill(written: Written, after: int) -> None:
    """It wrote so many steps, then no more."""
    del written.steps[after:]
    written.end = None


@pytest.mark.parametrize("counts", [True, False])
def test_a_run_without_faults_is_clean(counts: bool) -> None:
    told = found(run(counts=counts))
    assert told.clean, told
    assert (told.steps, told.samples, told.replaced_steps, told.problems) == (8, 48, 0, ())


def test_a_step_that_nobody_committed() -> None:
    written = run()
    for w in written:
        del w.steps[3]
    told = found(written)
    assert (told.lost_steps, told.lost_samples, told.doubled_steps) == (1, 6, 0)
    assert "nobody committed step 4" in told.problems[0]


def test_a_member_that_was_killed_before_it_could_write_is_no_gap() -> None:
    written = run()
    kill(written[1], 3)  # the others counted its samples in step 4: nothing else is known of it
    assert found(written).clean
    written = run(counts=False)
    kill(written[1], 3)  # where the model does not count, only what members wrote is known
    assert found(written).lost_samples == 2 * 5


def test_a_step_that_died_with_its_only_writer() -> None:
    written = run()
    dead = msgspec.structs.replace(written[1], steps=list(written[1].steps))
    kill(written[1], 3)
    written[1].steps.append(msgspec.structs.replace(dead.steps[3], weights="other", counted=(1, 2, 3), samples=(1,)))
    told = found(written)
    assert told.clean, told
    assert told.replaced_steps == 1


def test_a_step_that_is_redone_by_others_is_no_fault_but_by_those_who_committed_it_is() -> None:
    written = run()
    old = written[1].steps[3]
    written[1].steps.insert(3, msgspec.structs.replace(old, weights="undone", counted=(1, 2), at=3.5))
    told = found(written)
    assert (told.lost_steps, told.unlike_weights, told.doubled_steps) == (1, 0, 0)
    assert "committed and undone later: member 1 (process 101)" in told.problems[0]


def test_a_step_of_one_that_was_left_out_and_did_not_know_it_yet_is_no_fault() -> None:
    """Member 1 was stopped; the others take step 4 without it; it goes on, takes its own, and comes back at step 5."""
    written = run()
    for w in written:
        for place in range(8):
            change(
                w, place, view=1 if place < 3 else 2 if place == 3 else 3, members=(0, 2) if place == 3 else (0, 1, 2)
            )
    change(written[1], 3, view=1, members=(0, 1, 2), weights="old", counted=(1, 2, 3))
    told = found(written)
    assert told.clean, told
    assert told.replaced_steps == 1
    for w in (written[0], written[2]):
        change(w, 3, members=(0, 1, 2))  # it was not left out
    assert found(written).unlike_weights == 1


def test_all_are_lost_and_go_on_from_a_checkpoint() -> None:
    before, after = run(), run()
    for w in before:
        kill(w, 5)
    for w in before:
        for place in (3, 4):  # steps 4 and 5 are taken again, by others and with other samples
            change(w, place, weights=f"old{place}", counted=(0, 1, 2, 3, 4, 5))
    for w in after:
        w.pid += 100
        del w.steps[:3]
        w.steps[:] = [msgspec.structs.replace(s, at=s.at + 100) for s in w.steps]
    told = found(before + after)
    assert told.clean, told
    assert (told.steps, told.replaced_steps) == (8, 2)


def test_members_that_differ() -> None:
    written = run()
    change(written[2], 4, weights="else")  # in one step only
    assert (found(written).unlike_weights, found(written).lost_steps) == (1, 0)
    written = run()
    for place in range(5, 8):  # to the end
        change(written[2], place, weights=f"else{place}")
    told = found(written)
    assert told.unlike_weights == 3
    assert told.problems[0] == (
        "after step 6 weights differed: member 0 (process 100) with w6, member 2 (process 102) with else5"
    )


def test_a_step_applied_twice() -> None:
    written = run()
    change(written[0], 2, times=2)
    assert found(written).doubled_steps == 1
    written = run()
    written[0].steps.insert(2, written[0].steps[2])  # the same step twice, and the same weights after it
    assert found(written).doubled_steps == 1
    written = run()
    change(written[0], 2, counted=written[0].steps[1].counted)  # members disagree on who took part
    assert found(written).doubled_steps == 1
    written = run(counts=False)
    other = msgspec.structs.replace(written[1], pid=999, steps=[written[1].steps[4]], end=None)
    change(other, 0, samples=(0, 1))  # two processes of one member gave to the same step
    assert found([*written, other]).doubled_steps == 1


@pytest.mark.parametrize("counts", [True, False])
def test_samples_lost_and_doubled(counts: bool) -> None:
    written = run(counts=counts)
    for w in written:  # sample 0 takes the place of 23, everywhere
        for place, line in enumerate(w.steps[:4]):
            swap = {23: 0}
            own = tuple(swap.get(n, n) for n in line.samples)
            counted = tuple(swap.get(n, n) for n in line.counted) if line.counted else None
            change(w, place, samples=own, counted=counted)
    told = found(written)
    assert (told.lost_samples, told.doubled_samples, told.lost_steps) == (1, 1, 0)
    assert told.problems == (
        "in epoch 0 1 samples were lost: 23",
        "in epoch 0 1 samples counted too often: 0",
    )
    written = run()
    for w in written:
        change(w, 1, counted=(*(w.steps[1].counted or ()), 3, 3, 99))  # 99 is no sample
    assert found(written).doubled_samples == 3


def test_an_epoch_that_never_came() -> None:
    written = run(epochs=1)
    assert found(written).lost_samples == 24
    assert Ledger(written).check(epochs=1).clean


def test_steps_of_members_that_do_not_wait_for_each_other() -> None:
    begin = Begin(samples=4, epochs=1, together=False)

    def two(first: list[int], second: list[int], totals: tuple[int, ...] | None = None) -> Findings:
        written = []
        for m, steps in enumerate((first, second)):
            lines = [Step(step=s, epoch=0, samples=(2 * m + i,), weights=f"{m}{i}") for i, s in enumerate(steps)]
            written.append(Written(member=m, pid=m, begin=begin, steps=lines, end=End(weights="same", totals=totals)))
        return found(written)

    assert two([1, 2], [1, 2]).clean
    assert two([1, 2], [1, 2], (1, 1, 1, 1)).clean
    assert two([1, 3], [1, 2]).lost_steps == 1
    assert two([1, 1], [1, 2]).doubled_steps == 1
    assert two([1], [1, 2]).lost_samples == 1
    told = two([1, 2], [1, 2], (1, 0, 3, 1))  # what counts is what the weights say
    assert (told.lost_samples, told.doubled_samples) == (1, 2)


@settings(max_examples=200, deadline=None)
@given(dice=st.randoms(use_true_random=False), members=st.integers(2, 5))
def test_deaths_are_clean_and_any_one_fault_among_them_is_not(dice: random.Random, members: int) -> None:
    written = run(members)
    steps = len(written[0].steps)
    for w in written[1:]:
        if dice.random() < 0.5:
            kill(w, dice.randrange(steps))
            if w.steps and dice.random() < 0.5:  # its last step was seen by nobody else
                change(w, -1, weights="gone", counted=(0, 0))
    assert found(written).clean, found(written)
    place = dice.randrange(steps)
    alive = [w for w in written if w.end]
    fault = dice.choice(["step", "weights", "twice", "sample"] if len(alive) > 1 else ["step", "twice", "sample"])
    for w in written:
        if len(w.steps) <= place:
            continue
        line = w.steps[place]
        if fault == "step":
            w.steps[place] = msgspec.structs.replace(line, step=-1)
        elif fault == "weights" and w is alive[-1]:
            change(w, place, weights="differs")
        elif fault == "twice":
            change(w, place, times=2)
        elif fault == "sample":
            change(w, place, counted=(line.counted or ())[1:])
        w.steps[:] = [s for s in w.steps if s.step > 0]
    told = found(written)
    assert not told.clean
    assert {
        "step": told.lost_steps + told.lost_samples,
        "weights": told.unlike_weights,
        "twice": told.doubled_steps,
    }.get(fault, told.lost_samples)


# ---- files


def test_files_are_read_and_a_last_line_that_was_cut_off_is_left(tmp_path: Path) -> None:
    written = run()
    for w in written:
        lines = [w.begin, *w.steps, w.end]
        path(tmp_path, w.member, w.pid).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert Ledger.read(tmp_path).written == written
    file = path(tmp_path, 1, 101)
    text = file.read_bytes()
    file.write_bytes(text[: len(text) // 2])
    assert Ledger.read(tmp_path).check().clean
    file.write_bytes(text.replace(b'"step":3', b'"step":x', 1))
    with pytest.raises(ConfigError, match=r"member-1-101.jsonl:4: .*this is no ledger, or its disk was full"):
        Ledger.read(tmp_path)


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is it the right directory"):
        Ledger.read(tmp_path)


# ---- what a model counts


def test_the_weights_say_what_has_counted() -> None:
    model = Counted(nn.Linear(2, 1), samples=6)
    optimizer = torch.optim.SGD(model.groups(momentum=0.9), lr=0.1)
    for numbers, times in (([1, 3, 4], 1), ([0, 0, 5], 1), ([2], 2)):
        before = model.seen.detach().clone()
        for _ in range(times):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum() + model.count(torch.tensor(numbers))
            assert loss.item() == model(torch.ones(1, 2)).sum().item()
            loss.backward()
            optimizer.step()
        assert _counted(before - model.seen.detach()) == (tuple(numbers), times)
    assert _counted(torch.zeros(3)) == ((), 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "sync", "async"])
def test_a_real_run_is_clean_and_is_not_when_a_line_is_taken_away(strategy: str, tmp_path: Path) -> None:
    book = tmp_path / "book"
    args = ["--ledger", str(book), "--epochs", "2", "--samples", "101"]
    done = Cluster(2).run(Path(train_counted.__file__), args, settings=Settings(strategy=strategy))
    assert [f.code for f in done] == [0, 0], done
    ledger = Ledger.read(book)
    told = ledger.check()
    assert told.clean, told
    assert told.samples == 202
    assert {w.member for w in ledger.written} == {0, 1}
    if strategy != "async":
        for w in ledger.written:
            del w.steps[4]
        assert ledger.check().lost_samples == 16
    else:
        first, second = ledger.written
        assert first.end is not None
        assert first.end.totals == (2,) * 101
        assert second.end == first.end


@pytest.mark.slow
def test_a_real_run_that_loses_a_worker_loses_nothing(tmp_path: Path) -> None:
    """With server processes the others get the batches of the dead."""

    class Quiet:
        def line(self, rank: int, stream: str, text: str) -> None: ...
        def raw(self, data: bytes) -> None: ...

    spec = JobSpec(
        script=train_counted.__file__,
        args=("--ledger", str(tmp_path / "book"), "--step-s", "0.002"),
        num_members=3,
        num_servers=1,
        forgives=True,
        settings=Settings(root=str(tmp_path), name="run", strategy="async"),
        threads=1,
    )
    job = Local(Quiet()).start(spec)
    with Faults(FaultPlan().pause(member=2, step=5, for_s=0.2).kill(member=1, step=10, after_s=0.005), job) as faults:
        outcome = job.wait(60.0)
    assert outcome is not None
    assert [e.code for e in outcome.ended] == [0, -9, 0, 0]
    assert [i.missed for i in faults.injected] == ["", ""]
    told = Ledger.read(tmp_path / "book").check()
    assert told.clean, told
