"""Samples get from the learner into a run's input queue once each, at real desks that are full, shut, picky or gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.status import Status
from paceline.core.view import View
from paceline.serve import learner as module
from paceline.serve.learner import Learner, text
from paceline.serve.refused import Refused
from paceline.server.outside import desk as desk_module
from paceline.server.outside.desk import Desk
from paceline.server.outside.inbox import Inbox
from paceline.server.outside.outsider import Outsider
from paceline.server.outside.samples import pack, unpack
from paceline.server.outside.visits import Given, Take
from paceline.server.service import Service
from paceline.transport.wires import Wires

TOKEN = "a token that only this test knows"
LIMIT_S = 60.0
LIKE = pack((torch.zeros(2), 0))


class Run:
    """A run with a desk, whose workers take samples when the test says so."""

    def __init__(self, directory: Path) -> None:
        self._wires = Wires(TOKEN)
        self._service = Service(limit_s=60)
        view = View(number=1, members=(self._wires.describe(0, "host"),))
        self._wires.join(view, 0, limit_s=10, status=Status(None))
        self.desk = Desk(
            self._wires, range(1), directory=directory, token=TOKEN, strategy="async", service=lambda: self._service
        )
        self.address = view.members[0].address

    def take(self, batch: int, wait_s: float = LIMIT_S) -> list[int]:
        """The labels of one batch, in their order; empty: they have not come."""
        ask = Take(course="0", number=0, batch_size=batch, size=1, like=LIKE)
        given = self.desk._tray.take(0, ask, wait_s)
        if not isinstance(given, Given):
            return []
        self.desk._tray.done(0, "0", 1 << 20)
        return [unpack(sample)[1] for sample in given.samples]

    def close(self) -> None:
        self.desk.close()
        self._service.close()
        self._wires.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROOM_S", 0.3)
    monkeypatch.setattr(module, "_AGAIN_S", 1.0)
    monkeypatch.setattr(desk_module, "_SAMPLES_S", 0.2)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(tmp_path)) as made:
        yield made


@contextlib.contextmanager
def learning(connect: Callable[[], Outsider], limit: int = 4096) -> Iterator[Learner]:
    with contextlib.closing(Learner(connect, limit)) as made:
        yield made


def to(run: Run) -> Callable[[], Outsider]:
    return lambda: Outsider(run.address, TOKEN, 10.0)


def samples(first: int, count: int) -> list[bytes]:
    return [pack((torch.zeros(2), i)) for i in range(first, first + count)]


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def refused(learner: Learner, status: int, some: list[bytes]) -> str:
    """Put until it is refused with this status: why. What is taken meanwhile counts."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            learner.put(some)
        except Refused as refused:
            if refused.status == status:
                return refused.why
        time.sleep(0.02)
    raise AssertionError(learner.state())


def test_every_sample_arrives_once_and_in_order(run: Run) -> None:
    assert not run.take(1, 0.01)  # the script asks
    with learning(to(run)) as learner:
        for first in range(0, 900, 300):
            learner.put(samples(first, 300))
        assert run.take(900) == list(range(900))
        until(lambda: learner.state().uploaded == 900)
        state = learner.state()
        assert (state.waiting, state.refused, state.lost, state.words) == (0, 0, 0, "")
        assert 'paceline_serve_learn_samples_total{outcome="uploaded"} 900\n' in text(state)


def test_a_full_queue_is_back_pressure_and_loses_nothing(run: Run) -> None:
    run.desk._tray.inbox = Inbox(max_samples=5)
    assert not run.take(1, 0.01)
    with learning(to(run), limit=10) as learner:
        learner.put(samples(0, 10))
        until(lambda: learner.state().uploaded == 5)
        until(lambda: "input queue is full" in learner.state().words)
        with pytest.raises(Refused) as full:
            learner.put(samples(10, 6))  # all or none
        assert full.value.status == 429
        assert full.value.retry_after_s
        assert "5 samples wait for the run already, 10 may" in full.value.why
        assert "input queue is full" in full.value.why
        learner.put(samples(10, 5))
        seen = [label for _ in range(3) for label in run.take(5)]
        assert seen == list(range(15))
        until(lambda: learner.state().words == "")
        with pytest.raises(Refused) as large:
            learner.put(samples(0, 11))
        assert large.value.status == 413


def test_a_script_that_never_asks_is_told_and_heals(run: Run) -> None:
    with learning(to(run)) as learner:
        learner.put(samples(0, 3))
        until(lambda: learner.state().words)
        assert "run.uploads()" in refused(learner, 503, samples(3, 1))
        assert learner.state().waiting == 3  # what was taken in is kept
        assert run.take(3) == [0, 1, 2]
        until(lambda: learner.state().words == "")
        learner.put(samples(3, 1))
        assert run.take(1) == [3]


def test_samples_of_another_form_are_refused_and_counted(run: Run) -> None:
    assert not run.take(1, 0.01)
    with learning(to(run)) as learner:
        learner.put([pack((torch.zeros(3), 0))] * 2)
        until(lambda: learner.state().refused == 2)
        assert "the run takes samples like (float32[2], int)" in learner.state().words
        with pytest.raises(Refused) as shut:
            learner.put(samples(0, 1))
        assert shut.value.status == 503
        until(lambda: not _is_refused(learner, samples(0, 1)))  # now and then one is tried
        assert run.take(1) == [0]
        until(lambda: learner.state().words == "")


def _is_refused(learner: Learner, some: list[bytes]) -> bool:
    try:
        learner.put(some)
    except Refused:
        return True
    return False


def test_a_run_that_ends_is_told_and_one_that_comes_back_is_found(tmp_path: Path) -> None:
    runs = [Run(tmp_path)]

    def connect() -> Outsider:
        if not runs:
            raise ConfigError("run 'x' is over (finished): its checkpoints have the weights")
        return Outsider(runs[0].address, TOKEN, 10.0)

    assert not runs[0].take(1, 0.01)
    with learning(connect) as learner:
        learner.put(samples(0, 2))
        assert runs[0].take(2) == [0, 1]
        runs.pop().close()
        refused(learner, 503, samples(2, 1))
        until(lambda: "is over" in learner.state().words)
        kept = learner.state().waiting
        put = learner.state().uploaded + learner.state().lost + kept
        runs.append(Run(tmp_path / "again"))
        try:
            assert not runs[0].take(1, 0.01)
            if not kept:
                until(lambda: not _is_refused(learner, samples(9, 1)))
            assert runs[0].take(1)
            until(lambda: learner.state().words == "")
            state = learner.state()
            assert state.uploaded + state.lost + state.waiting == put + (not kept)
        finally:
            runs[0].close()
