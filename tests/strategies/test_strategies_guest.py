"""A guest of a run, over real sockets: what it brings counts as a member's would, once, and it can stop nobody."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import AuthError, ConfigError, Interrupted, TimedOut
from paceline.server.outside import calls as c
from paceline.server.outside.calling import Calling, Where
from paceline.server.outside.shelf import wrap
from paceline.strategies import Guest, Local, make_strategy, words_of
from paceline.strategies import trips as trips_module
from paceline.strategies.luggage import Luggage
from paceline.testing.together import together
from paceline.transport.channel import connect
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

    def __init__(self, at: str, model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> None:
        self.told: list[str] = []
        asked = {"every": 4, "codec": "none", "weights": "none", "last_s": 0.0, **options}
        more = {"optimizer": optimizer} if optimizer else {}
        tell = self.told.append
        super().__init__(solo(), Guest(at, **asked), model or net(seed=9), seat=1, tell=tell, limit_s=10, **more)

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
    assert visitor.guest.trips.brought == 3
    assert host.strategy.readings()["guest_samples"] == 3 * 4 * SAMPLES


@pytest.mark.parametrize("inner", ["none", "allreduce"])
def test_members_end_a_round_with_the_same_weights_and_the_guests_are_in_them(inner: str) -> None:
    """Through the members' codec too, and from site to site; a guest that has trained less weighs less."""
    at: list[str] = []
    sites = ["a", "b"] if inner == "none" else ["a", "a", "b"]
    met = threading.Barrier(len(sites) + 1)

    def member(group: Group) -> tuple[torch.Tensor, float]:
        words = f"local(every=4, average=samples, codec=quantize(8), inner={inner}, guests=2)"
        with closing(Host(words, group=group, seat=group.rank, site=sites[group.rank])) as host:
            host.train(1)
            if group.rank == 0:
                at.append(host.hosting.address)
            met.wait(20)
            host.train(2)
            if group.rank == 0:
                host.until(lambda: host.offers.waiting == 1)
            met.wait(20)
            host.train(1)
            told = host.strategy.readings()
            return host.weights, told.get("guest_samples", 0.0)

    def guest() -> None:
        met.wait(20)
        visitor = Visitor(at[0], every=2)
        visitor.train(2)
        met.wait(20)

    thread = beside(guest)
    (first, samples), *others = together(len(sites), member, hosts=sites)
    thread.join(20)
    assert all(torch.equal(first, other) for other, _ in others)
    assert samples == 2 * SAMPLES
    if inner != "none":
        return

    def trained(seat: int, steps: int) -> torch.Tensor:
        with closing(Seated(solo(), make_strategy("local(every=9)"), net(), seat=seat)) as member:
            member.train(steps)
            return member.weights

    want = (4 * trained(0, 4) + 4 * trained(1, 4) + 2 * trained(1, 2)) / 10
    start = trained(0, 0)
    assert float((first - want).norm()) < 0.02 * float((want - start).norm())


def test_a_guest_with_the_usual_codecs_learns_with_the_run(hosts: Callable[..., Host]) -> None:
    host = hosts("diloco(every=4, guests=1)")
    visitor = Visitor(host.hosting.address, codec="topk(0.1, values=2bit)", weights="bf16")
    start = host.weights
    for _ in range(6):
        train_beside(host, visitor, 4)
        host.train(4)
    luggage = visitor.guest.luggage
    assert luggage is not None
    assert visitor.guest.trips is not None
    assert visitor.guest.trips.brought == 6
    assert luggage._anchor.nbytes == 2 * sum(luggage.numels)
    assert host.strategy.readings()["guest_rounds"] == 6
    assert float((visitor.weights - host.weights).norm()) < float((host.weights - start).norm())


# ---- links that break, and budgets


def brought_in_all(host: Host, body: Callable[[], object]) -> torch.Tensor:
    """The sum of all differences that the run takes in meanwhile, as they are."""
    total = torch.zeros(sum(host.offers._numels))
    add = host.offers._add

    def noted(guest: str, bring: c.Bring, codec: Any, payloads: list[torch.Tensor]) -> None:
        at = 0
        for payload, numel in zip(payloads, host.offers._numels):
            codec.decode_add(payload, total[at : at + numel])
            at += numel
        add(guest, bring, codec, payloads)

    host.offers._add = noted
    body()
    host.offers._add = add
    return total


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("codec", ["none", "topk(0.1)"])
def test_a_call_that_breaks_loses_nothing_and_says_nothing_twice(
    hosts: Callable[..., Host], when: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the run has taken the difference, or after, when its answer is lost: what was brought in all and what is
    unsaid still are together what the guest has learnt."""
    host = hosts("local(every=1000, guests=1)")
    visitor = Visitor(host.hosting.address, codec=codec, weights="bf16")
    monkeypatch.setattr("paceline.strategies.trips._FIRST_PAUSE_S", 0.0)
    lobby = host.hosting._lobby
    real = lobby._offers.bring

    def breaks(*said: Any) -> c.Thanks:
        if when == "after":
            real(*said)
        lobby._offers.bring = real
        raise Interrupted("the cable was cut")

    def body() -> None:
        lobby._offers.bring = breaks
        train_beside(host, visitor, 6)  # a call at step 4 breaks
        host.train(1)
        host.strategy._rounds.place.since = 10**6  # type: ignore[attr-defined]
        host.train(1)  # a round
        train_beside(host, visitor, 2)

    start = host.weights.to(torch.bfloat16).float()
    total = brought_in_all(host, body)
    guest = visitor.guest
    assert guest.trips is not None
    assert guest.luggage is not None
    assert guest.trips.brought == (2 if when == "after" else 1)
    assert guest.trips.brought_samples == 8 * SAMPLES
    unsaid = torch.zeros_like(total)
    at = 0
    for i, numel in enumerate(guest.luggage.numels):
        if i in guest.luggage._residuals:
            unsaid[at : at + numel] = guest.luggage._residuals[i][:numel]
        at += numel
    # The last call was at the guest's last step, from which on it has the run's weights.
    learnt = start - visitor.own[-1]
    assert torch.allclose(total + unsaid, learnt, atol=1e-5)
    assert any("not reached" in line for line in visitor.told)
    assert any("reached again" in line for line in visitor.told)


def test_a_run_that_is_away_is_called_less_and_less(hosts: Callable[..., Host]) -> None:
    host = hosts("local(every=1000, guests=1)")
    visitor = Visitor(host.hosting.address, every=1)
    train_beside(host, visitor, 1)
    trips = visitor.guest.trips
    assert trips is not None
    now = [0.0]
    trips.clock = lambda: now[0]
    host.strategy.close()
    before, tries = trips.calls, []
    for second in (0, 4, 5, 14, 15, 34, 35, 74, 75, 154, 155, 314, 315, 614, 615, 914, 915):
        now[0] = float(second)
        visitor.train(1)
        if trips.calls > before:
            before = trips.calls
            tries.append(second)
    assert tries == [0, 5, 15, 35, 75, 155, 315, 615, 915]
    assert sum("not reached" in line for line in visitor.told) == 1
    visitor.strategy.together(end=True)
    assert "is not brought" in visitor.told[-1]


def test_no_hour_has_more_bytes_than_it_may(hosts: Callable[..., Host]) -> None:
    """Training goes on, with more steps between calls; it is said once."""
    host = hosts("local(every=1, guests=1)")
    budget = 120_000
    visitor = Visitor(host.hosting.address, bytes_per_hour=budget)
    now, spent = [0.0], []
    visitor.guest.allowance._clock = lambda: now[0]
    spend = visitor.guest.allowance.spend

    def noted(nbytes: int) -> None:
        spent.append((now[0], nbytes))
        spend(nbytes)

    visitor.guest.allowance.spend = noted  # type: ignore[method-assign]
    for minute in range(0, 60 * 4, 3):
        now[0] = 60.0 * minute
        train_beside(host, visitor, 1)
        if host.offers.waiting:
            host.train(1)
    for at, _ in spent:
        assert sum(n for then, n in spent if at <= then < at + 3600) <= budget
    calls = visitor.guest.trips.calls  # type: ignore[union-attr]
    whole = visitor.guest.trips._whole_bytes  # type: ignore[union-attr]
    assert calls >= 3 * (budget // whole)  # what it may spend is used
    assert calls < 80 / 4
    assert sum("bytes_per_hour" in line for line in visitor.told) == 1
    assert host.strategy.readings()["guest_samples"] >= 60 * SAMPLES  # nothing of what it learns is lost


def test_an_allowance_that_permits_no_call_is_refused(hosts: Callable[..., Host]) -> None:
    host = hosts("local(every=4, guests=1)")
    with pytest.raises(ConfigError, match="one call takes"):
        train_beside(host, Visitor(host.hosting.address, bytes_per_hour=9000), 1)


def test_nothing_is_spent_on_the_first_weights_that_may_not_be(hosts: Callable[..., Host]) -> None:
    visitor = Visitor(hosts("local(every=4, guests=1)").hosting.address, bytes_per_hour=1e6)
    visitor.guest.allowance.spend(990_000)
    visitor.world.limit_s = 0.3
    with pytest.raises(TimedOut, match="permits no call for 60 min"):
        visitor.train(1)
    assert visitor.guest.allowance.total == 990_000


def test_a_guest_says_what_it_waits_for_at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trips_module, "_TOLD_S", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    visitor = Visitor(f"127.0.0.1:{port}")
    visitor.world.limit_s = 1.5
    with pytest.raises(TimedOut):
        visitor.train(1)
    assert [line.partition(",")[0] for line in visitor.told] == [
        f"the run at 127.0.0.1:{port} gives no weights to begin with yet"
    ]


# ---- what is left out


def test_one_that_was_away_for_long_begins_with_the_newest_weights(hosts: Callable[..., Host]) -> None:
    host = hosts("local(every=1, guests=guests(1, at='127.0.0.1:0', oldest=2))")
    visitor = Visitor(host.hosting.address, codec="topk(0.1)")
    train_beside(host, visitor, 3)
    host.train(4)
    train_beside(host, visitor, 1)
    assert "4 rounds old" in visitor.told[-1]
    assert torch.equal(visitor.weights, host.weights)
    assert visitor.guest.luggage is not None
    assert not visitor.guest.luggage._residuals
    assert host.offers.waiting == 0
    train_beside(host, visitor, 4)
    assert host.offers.waiting == 1


def test_what_is_not_finite_is_never_sent(hosts: Callable[..., Host]) -> None:
    host = hosts("local(every=1000, guests=1)")
    visitor = Visitor(host.hosting.address)
    train_beside(host, visitor, 3)
    with torch.no_grad():
        next(visitor.model.parameters())[0, 0] = float("nan")
    total = brought_in_all(host, lambda: train_beside(host, visitor, 1))
    assert not total.any()
    assert "infinite or nan" in visitor.told[-1]
    assert bool(torch.isfinite(visitor.weights).all())


def test_one_whose_run_was_resumed_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the token that the run's directory keeps; a round that is undone is of no use."""
    monkeypatch.delenv(c.TOKEN)

    def run(words: str) -> Host:
        host = Host(words)
        host.world.directory = tmp_path
        host.hosting.look(0)
        return host

    host = run("local(every=1, guests=1)")
    port = host.hosting.address
    visitor = Visitor(str(tmp_path / "guests.json"))
    host.train(3)
    train_beside(host, visitor, 2)
    host.strategy.close()
    again = run(f"local(every=1, guests=guests(1, at='{port}', oldest=4))")
    train_beside(again, visitor, 2)
    assert "resumed" in visitor.told[-1]
    train_beside(again, visitor, 4)
    assert again.offers.waiting == 1
    again.strategy.close()


# ---- going on


def test_a_guest_goes_on_bit_for_bit(hosts: Callable[..., Host]) -> None:
    """With its residual, what it has sent in vain, the bytes of this hour, and its place between two calls."""
    host = hosts("local(every=1000, guests=2)")
    visitor = Visitor(host.hosting.address, codec="topk(0.1, values=2bit)", weights="quantize(8)", bytes_per_hour=1e6)
    train_beside(host, visitor, 6)
    visitor.guest.trips._call = lambda **_: None  # type: ignore[union-attr, method-assign]
    saved, own = visitor.save()
    again = Visitor(host.hosting.address, codec="topk(0.1, values=2bit)", weights="quantize(8)", bytes_per_hour=1e6)
    again.load(saved, [own], visitor.step)
    assert again.save() == (saved, own)
    again.guest.trips._call = lambda **_: None  # type: ignore[union-attr, method-assign]
    for each in visitor, again:
        each.train(1)
    assert torch.equal(visitor.weights, again.weights)
    sent = [each.guest.luggage.make(1.0, 0.0, 0) for each in (visitor, again)]  # type: ignore[union-attr]
    assert torch.equal(sent[0].data, sent[1].data)
    assert sent[0].number == 2
    assert again.guest.allowance._spent == visitor.guest.allowance._spent != []


def test_one_that_was_killed_does_not_bring_the_same_again(hosts: Callable[..., Host]) -> None:
    host = hosts("local(every=2, guests=2)")
    visitor = Visitor(host.hosting.address)
    train_beside(host, visitor, 2)
    saved, own = visitor.save()
    train_beside(host, visitor, 2)
    host.train(2)
    again = Visitor(host.hosting.address)
    again.load(saved, [own], 2)
    train_beside(host, again, 2)
    assert "more than its checkpoint knows" in again.told[-1]
    assert host.offers.waiting == 0
    assert torch.equal(again.weights, host.weights)


def test_codes_that_have_changed_leave_out_what_was_unsaid(hosts: Callable[..., Host]) -> None:
    host = hosts("local(every=1000, guests=1)")
    visitor = Visitor(host.hosting.address, codec="topk(0.1)")
    train_beside(host, visitor, 6)
    saved, own = visitor.save()
    again = Visitor(host.hosting.address)
    again.load(saved, [own], 6)
    assert "other codes" in again.told[-1]
    train_beside(host, again, 2)
    assert torch.equal(again.weights, host.weights)


# ---- who is let in


def test_a_wrong_token_opens_nothing(hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    host = hosts("local(every=4, guests=1)")
    monkeypatch.setenv(c.TOKEN, "another one")
    with pytest.raises(AuthError, match="token is not that of the run"):
        Visitor(host.hosting.address).train(1)
    monkeypatch.delenv(c.TOKEN)
    with pytest.raises(ConfigError, match=f"set {c.TOKEN}"):
        Visitor(host.hosting.address).train(1)


def test_another_model_is_refused(hosts: Callable[..., Host]) -> None:
    host = hosts("local(every=4, guests=1)")
    with pytest.raises(ConfigError, match="model is not the run's"):
        Visitor(host.hosting.address, model=nn.Linear(6, 3)).train(1)


def frozen(seed: int) -> nn.Module:
    model = net()
    torch.nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(seed))
    model[0].requires_grad_(False)
    return model


def test_frozen_weights_must_be_the_same(hosts: Callable[..., Host]) -> None:
    def some(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    host = hosts("local(every=4, guests=1)", model=frozen(1), optimizer=some)
    at = host.hosting.address
    train_beside(host, Visitor(at, model=frozen(1), optimizer=some), 1)
    with pytest.raises(ConfigError, match="those that are not the same values"):
        Visitor(at, model=frozen(2), optimizer=some).train(1)


def test_there_are_only_so_many_places(hosts: Callable[..., Host]) -> None:
    host = hosts("local(every=4, guests=1)")
    visitor = Visitor(host.hosting.address, every=1)
    train_beside(host, visitor, 1)
    lobby = host.hosting._lobby
    call = c.Call(guest="another", model=lobby._model, round=-1)
    with Calling(Where(host.hosting.address), call, lambda n: None):
        train_beside(host, visitor, 1)
        assert "places for guests are taken" in visitor.told[-1]
    host.until(lambda: lobby.here == 0)
    visitor.guest.trips._after = 0.0  # type: ignore[union-attr]
    train_beside(host, visitor, 1)
    assert visitor.told[-1].endswith("is reached again")


def test_a_place_that_is_about_to_be_left_is_waited_for(
    hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the guest itself, whose last call the run has not seen the end of yet."""
    monkeypatch.setattr("paceline.server.outside.lobby._PLACE_S", 20.0)
    host = hosts("local(every=4, guests=1)")
    visitor = Visitor(host.hosting.address, every=1)
    call = c.Call(guest="another", model=host.hosting._lobby._model, round=-1)
    with Calling(Where(host.hosting.address), call, lambda n: None) as calling:
        threading.Timer(0.3, calling.close).start()
        train_beside(host, visitor, 1)
    assert visitor.guest.trips is not None
    assert (visitor.guest.trips.calls, visitor.told) == (2, [])


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff" * 40,
        c.encode(c.Fetch(code="none")),
        c.encode(c.Call(guest="x", model="", round=0, protocol=99)),
        c.encode(c.Call(guest="x" * 65, model="model", round=0)),
        c.encode(c.Call(guest="\x1b[2J", model="model", round=0)),  # which would clear a terminal
    ],
)
def test_what_cannot_be_read_ends_that_call_alone(hosts: Callable[..., Host], said: bytes) -> None:
    host = hosts("local(every=4, guests=1)")
    host.hosting._lobby._model = "model"
    with connect(host.hosting.address, TOKEN, 5.0) as channel:
        channel.send(said)
        with pytest.raises(ConfigError):
            c.decode_from_run(channel.recv(10.0), c.Reply)
    host.until(lambda: host.hosting._lobby.here == 0)
    call = c.Call(guest="x", model="model", round=0)
    with Calling(Where(host.hosting.address), call, lambda n: None) as calling:
        assert calling.reply.takes


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("local(guests=2, average=median)", "no place for guests"),
        ("local(guests=2, average=trimmed)", "no place for guests"),
        ("local(guests=2, average=loss)", "no place for guests"),
        ("diloco(every=100, overlap=5, guests=2)", "overlap"),
        ("local(guests=-1)", "from 0"),
        ("local(guests=guests(2, at='10.0.0.1'))", "an address"),
        ("local(guests=guests(2, at='10.0.0.1:70000'))", "an address"),
        ("guest('10.0.0.1:70000')", "ip:port"),
        ("guest(7000)", "host:port"),
        ("local(guests=guests(2, oldest=-1))", "rounds"),
        ("guest('nowhere')", "host:port"),
        ("guest('10.0.0.1:7000', every=0)", "steps"),
        ("guest('10.0.0.1:7000', bytes_per_hour=-5)", "bytes_per_hour"),
        ("guest('10.0.0.1:7000', weights=topk)", "bf16"),
        ("guest('10.0.0.1:7000', codec=dgc)", "momentum"),
        ("guest('10.0.0.1:7000', wait_s=-1)", "seconds"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_strategy(words)


def test_members_that_come_and_go_have_no_guests() -> None:
    strategy = make_strategy("local(every=4, guests=2)")
    assert isinstance(strategy, Local)
    with pytest.raises(ConfigError, match="must stay"):
        strategy.refuse_elastic(2, 4)


def test_words_come_back_as_they_were() -> None:
    for words in (
        "guest(at='10.0.0.1:7000', every=20, bytes_per_hour=20000000.0)",
        "local(every=50, outer='nesterov(lr=0.7, momentum=0.9)', guests=8)",
        "local(guests=\"guests(most=8, at='10.0.0.1:7000', oldest=4)\")",
    ):
        assert words_of(make_strategy(words)) == words


def test_a_guest_trains_alone() -> None:
    def body(group: Group) -> None:
        with pytest.raises(ConfigError, match="-n 1"):
            Seated(group, Guest("127.0.0.1:1"), net())

    together(2, body)


def test_a_run_that_gives_no_weights_is_waited_for_and_then_named(hosts: Callable[..., Host]) -> None:
    host = hosts("local(every=4, guests=1)")
    at = host.hosting.address
    host.strategy.close()
    visitor = Visitor(at)
    visitor.world.limit_s = 0.3
    with pytest.raises(TimedOut, match="no weights to begin with"):
        visitor.train(1)


def test_what_half_precision_cannot_hold_of_the_runs_weights_is_not_brought_back() -> None:
    """A guest in half precision that has learnt nothing has nothing to say, however exact what came was."""
    p, weights = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)), torch.linspace(1.0, 2.0, 8)
    luggage = Luggage([p], c.make_code("none"), c.make_weights_code("none"))
    came = wrap(3, [weights], luggage.code)
    luggage.arrive(came.round, came.sizes, came.data)
    for _ in range(2):  # from weights that came, and from those that it had when it called
        sent = luggage.make(samples=8.0, tokens=0.0, seed=0)
        said = torch.zeros(8)
        luggage.codec.decode_add(sent.data, said)
        assert not said.any()
        luggage.settle(taken=True)
        luggage.anchor_here()
