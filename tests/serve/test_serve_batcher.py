"""The batcher alone: every job settled exactly once with its own rows, whatever comes in which order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serve.batcher import Batcher, Job
from paceline.serve.refused import Refused


class Doubling:
    """An engine that doubles numbers, and keeps what it was given."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.batches: list[list[int]] = []
        self.gate = gate

    def __call__(self, batch: Sequence[list[int]], rows: Sequence[int]) -> tuple[list[list[int]], int]:
        flat = [number for numbers in batch for number in numbers]
        assert [len(numbers) for numbers in batch] == list(rows)
        self.batches.append(flat)
        if self.gate:
            assert self.gate.wait(60)
        if -1 in flat:
            raise ValueError("-1 cannot be doubled")
        return [[2 * number for number in numbers] for numbers in batch], len(self.batches)


class Outcome:
    """What became of one job; told twice is a failure."""

    def __init__(self, numbers: list[int], deadline: float = float("inf")) -> None:
        self.numbers = numbers
        self.told: list[Any] = []
        self.job = Job(numbers, len(numbers), lambda rows, version: self.told.append(rows), self.told.append, deadline)


@st.composite
def plans(draw: st.DrawFn) -> list[dict[str, Any]]:
    return draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "rows": st.integers(1, 5),
                    "turns": st.integers(0, 2),  # of the loop, before it comes
                    "fate": st.sampled_from(["stays", "stays", "stays", "withdrawn", "late", "bad"]),
                }
            ),
            min_size=1,
            max_size=25,
        )
    )


@settings(max_examples=120, deadline=None)
@given(
    plan=plans(),
    most=st.integers(5, 9),
    delay_us=st.sampled_from([0, 300]),
    limit=st.integers(6, 60),
    beside=st.booleans(),
)
def test_every_job_is_settled_once_with_its_own_rows(
    plan: list[dict[str, Any]], most: int, delay_us: int, limit: int, beside: bool
) -> None:
    engine = Doubling()

    async def go() -> list[tuple[dict[str, Any], Outcome]]:
        loop = asyncio.get_running_loop()
        batcher = Batcher(engine, max_batch_size=most, max_queue_delay_us=delay_us, queue_limit=limit, beside=beside)
        outcomes = []
        for number, one in enumerate(plan):
            for _ in range(one["turns"]):
                await asyncio.sleep(0)
            numbers = [100 * number + row for row in range(one["rows"])]
            if one["fate"] == "bad":
                numbers[0] = -1
            outcome = Outcome(numbers, loop.time() + (1e-5 if one["fate"] == "late" else 60))
            outcomes.append((one, outcome))
            try:
                batcher.submit(outcome.job)
            except Refused as refused:
                outcome.told.append(refused)
                continue
            if one["fate"] == "withdrawn":
                batcher.withdraw(outcome.job)
        await asyncio.wait_for(batcher.drained(), 60)
        assert batcher.waiting == 0
        batcher.close("over")
        return outcomes

    for one, outcome in asyncio.run(go()):
        if one["fate"] == "withdrawn" and not outcome.told:
            continue
        assert len(outcome.told) == 1, (one, outcome.told)
        told = outcome.told[0]
        if isinstance(told, Refused):
            expected = {"bad": (429, 500), "late": (429, 504), "withdrawn": (429,)}.get(one["fate"], (429,))
            assert told.status in expected, (one, told)
        else:
            assert one["fate"] != "bad"
            assert told == [2 * number for number in outcome.numbers]
    assert all(len(batch) <= most for batch in engine.batches)


def test_deadlines_hold_where_values_take_long() -> None:
    """A model that was quick with zeros leaves the loop with the first batch that is not."""

    def run(batch: Sequence[Any], rows: Sequence[int]) -> tuple[list[Any], int]:
        time.sleep(0.5)
        return list(batch), 1

    async def go() -> float:
        batcher = Batcher(run, max_batch_size=1)
        loop = asyncio.get_running_loop()
        batcher.submit(Outcome([1]).job)
        await asyncio.wait_for(batcher.drained(), 60)
        began = loop.time()
        told: list[float] = []
        batcher.submit(Outcome([2]).job)
        batcher.submit(Job([3], 1, lambda *_: None, lambda refused: told.append(loop.time()), began + 0.05))
        await asyncio.wait_for(batcher.drained(), 60)
        batcher.close("over")
        return told[0] - began

    assert asyncio.run(go()) < 0.4


def test_what_one_turn_reads_goes_together() -> None:
    engine = Doubling()

    async def go() -> None:
        batcher = Batcher(engine, max_batch_size=4)
        outcomes = [Outcome([number]) for number in range(6)]
        for outcome in outcomes:
            batcher.submit(outcome.job)
        await batcher.drained()
        assert [outcome.told for outcome in outcomes] == [[[2 * number]] for number in range(6)]

    asyncio.run(go())
    assert engine.batches == [[0, 1, 2, 3], [4, 5]]


def test_a_full_batch_does_not_wait_for_the_delay() -> None:
    engine = Doubling()

    async def go() -> None:
        batcher = Batcher(engine, max_batch_size=2, max_queue_delay_us=60_000_000)
        first, second = Outcome([1]), Outcome([2])
        batcher.submit(first.job)
        await asyncio.sleep(0.01)
        assert not engine.batches
        batcher.submit(second.job)
        await asyncio.wait_for(batcher.drained(), 30)
        assert (first.told, second.told) == ([[2]], [[4]])

    asyncio.run(go())


def test_late_ones_hear_it_while_the_engine_is_busy_and_are_not_computed() -> None:
    gate = threading.Event()
    engine = Doubling(gate)

    async def go() -> None:
        batcher = Batcher(engine, max_batch_size=4, beside=True)
        first = Outcome([1])
        batcher.submit(first.job)
        while not engine.batches:
            await asyncio.sleep(0.001)
        late = Outcome([7], asyncio.get_running_loop().time() + 0.01)
        batcher.submit(late.job)
        while not late.told:
            await asyncio.sleep(0.001)
        assert late.told[0].status == 504
        assert not first.told
        gate.set()
        await asyncio.wait_for(batcher.drained(), 30)
        assert first.told == [[2]]
        batcher.close("over")

    asyncio.run(go())
    assert engine.batches == [[1]]


def test_limits() -> None:
    async def go() -> None:
        batcher = Batcher(Doubling(), max_batch_size=4, queue_limit=5)
        with pytest.raises(Refused) as too_large:
            batcher.submit(Outcome([1] * 5).job)
        assert too_large.value.status == 413
        batcher.submit(Outcome([1] * 4).job)
        with pytest.raises(Refused) as too_many:
            batcher.submit(Outcome([1] * 2).job)
        assert (too_many.value.status, too_many.value.retry_after_s) == (429, 1)
        waiting = Outcome([1])
        batcher.submit(waiting.job)
        batcher.close("over")
        assert waiting.told[0].status == 503
        with pytest.raises(Refused) as closed:
            batcher.submit(Outcome([1]).job)
        assert closed.value.status == 503

    asyncio.run(go())


def test_one_bad_request_spoils_no_other() -> None:
    async def go() -> None:
        batcher = Batcher(Doubling(), max_batch_size=8)
        good, bad, other = Outcome([1]), Outcome([-1, 2]), Outcome([3])
        for outcome in (good, bad, other):
            batcher.submit(outcome.job)
        await batcher.drained()
        assert (good.told, other.told) == ([[2]], [[6]])
        assert bad.told[0].status == 500
        assert "-1 cannot be doubled" in bad.told[0].why

    asyncio.run(go())
