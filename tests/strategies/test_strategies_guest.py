"""A guest of a run, over real sockets: what it brings counts as a member's would, once, and it can stop nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paceline.server.outside import calls as c
from paceline.strategies import Guest, Local, make_strategy
from paceline.testing.together import together
from paceline.transport.group import Group, solo
from tests.strategies._apart import Member, closing, net

TOKEN = "a token that guests of this test know"
SAMPLES = 8  # of a batch


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(c.TOKEN, TOKEN)


class Seated(Member):
    """A member, or a guest, whose batches are those of a rank that the test gives, and are counted."""

    def __init__(self, *args: Any, seat: int = 0, **options: Any) -> None:
        self.seat = seat
        super().__init__(*args, **options)

    def batch(self) -> torch.Tensor:
        self.world.tally.add(SAMPLES, SAMPLES)
        generator = torch.Generator().manual_seed(1000 * self.step + self.seat)
        return torch.randn(SAMPLES, 6, generator=generator)


class Host(Seated):
    """The run's first member, or its only one."""

    def __init__(self, words: str, model: nn.Module | None = None, group: Group | None = None, **options: Any) -> None:
        self.told: list[str] = []
        strategy = make_strategy(words)
        super().__init__(group or solo(), strategy, model or net(), tell=self.told.append, **options)

    @property
    def hosting(self) -> Any:
        assert isinstance(self.strategy, Local)
        assert self.strategy._rounds is not None
        return self.strategy._rounds.hosting

    @property
    def offers(self) -> Any:
        return self.hosting._offers

    def until(self, done: Callable[[], bool], limit_s: float = 20.0) -> None:
        """Look after guests, as between two steps, until something has happened."""
        deadline = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < deadline
            self.hosting.look(self.strategy._rounds.count)  # type: ignore[union-attr, attr-defined]
            time.sleep(0.005)


class Visitor(Seated):
    """A guest, in this process."""

    def __init__(self, at: str, model: nn.Module | None = None, **options: Any) -> None:
        self.told: list[str] = []
        asked = {"every": 4, "codec": "none", "weights": "none", "last_s": 0.0, **options}
        super().__init__(solo(), Guest(at, **asked), model or net(seed=9), seat=1, tell=self.told.append, limit_s=10)

    @property
    def guest(self) -> Guest:
        assert isinstance(self.strategy, Guest)
        return self.strategy


@pytest.fixture
def hosts() -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(words: str, **options: Any) -> Host:
        made.append(Host(words, **options))
        made[-1].hosting.look(0)
        return made[-1]

    yield make
    for host in made:
        host.strategy.close()


def beside(body: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def train_beside(host: Host, visitor: Visitor, steps: int) -> None:
    """A guest trains while the run looks after it."""
    failed: list[BaseException] = []

    def body() -> None:
        try:
            visitor.train(steps)
        except BaseException as error:
            failed.append(error)

    thread = beside(body)
    host.until(lambda: not thread.is_alive())
    if failed:
        raise failed[0]


# ---- what it brings counts as a member's would


@pytest.mark.parametrize("words", ["local(every=4, average=samples", "diloco(every=4", "local(every=4, average=tokens"])
def test_one_member_and_a_guest_equal_two_members(words: str, hosts: Callable[..., Host]) -> None:
    """Bit for bit: nothing is encoded, and both have trained as much."""

    def body(group: Group) -> torch.Tensor:
        with closing(Seated(group, make_strategy(words + ")"), net(), seat=group.rank)) as member:
            member.train(12)
            return member.weights

    want = together(2, body)[0]
    host = hosts(words + ", guests=1)")
    visitor = Visitor(host.hosting.address, wait_s=20.0)
    done = beside(lambda: visitor.train(12))
    for _ in range(3):
        host.train(3)
        host.until(lambda: host.offers.waiting == 1)
        host.train(1)
    host.until(lambda: not done.is_alive())
    assert torch.equal(host.weights, want)
    assert torch.equal(visitor.weights, want)
    assert visitor.guest.brought == 3
    assert host.strategy.readings()["guest_samples"] == 3 * 4 * SAMPLES
