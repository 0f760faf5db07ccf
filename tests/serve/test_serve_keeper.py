"""The keeper: what is served is always a whole version, orders win over what comes, and the metric does not fall."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from paceline.core.errors import ConfigError, Interrupted
from paceline.serve import keeper as keeper_module
from paceline.serve.holdout import Holdout
from paceline.serve.keeper import Keeper, Rules
from paceline.serve.kept import Kept
from paceline.serve.places import Unfit
from paceline.serve.shelf import Shelf, Version
from paceline.serve.sources.source import Source, Update


class Fed:
    """A source that gives what the test puts in; an exception is raised instead."""

    what = "run digits"
    ended = ""
    note = ""
    orders = None

    def __init__(self) -> None:
        self._items: list[Update | Exception] = []
        self._changed = threading.Condition()
        self.asked = 0
        self.lost: Exception | None = None
        self.closed = False

    def feed(self, item: Update | Exception) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    @property
    def empty(self) -> bool:
        return not self._items

    def newest(self, wait_s: float) -> Update | None:
        with self._changed:
            self.asked += 1
            if self.lost:
                raise self.lost
            self._changed.wait_for(lambda: self._items, min(wait_s, 0.02))
            item = self._items.pop(0) if self._items else None
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self.closed = True


source: Callable[[], Source] = Fed  # it is one


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))


def whole(version: int, value: float, **more: Any) -> Update:
    state = net().state_dict()
    tensors = {
        n: torch.full_like(t, value) if t.is_floating_point() else torch.tensor(version) for n, t in state.items()
    }
    return Update(version, time.time(), tensors, whole=True, **more)


def part(version: int, value: float, name: str = "0.weight") -> Update:
    return Update(version, time.time(), {name: torch.full_like(net().state_dict()[name], value)}, whole=False)


def until(ready: Callable[[], object], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def kept(directory: Path, fed: Fed, **more: Any) -> Iterator[Keeper]:
    keeper = Keeper(Shelf(directory, keep=3), fed, model=net(), **more)
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.close()
    assert fed.closed


def value(shelf: Shelf, number: int, name: str = "0.weight") -> float:
    return float(shelf.read(number)[name].view(-1)[0])


def test_versions_are_taken_as_they_come(tmp_path: Path) -> None:
    fed, shelf = Fed(), Shelf(tmp_path)
    with kept(tmp_path, fed) as keeper:
        assert keeper.state().source == "waits for run digits"
        assert not keeper.wait(0.01)
        fed.feed(whole(10, 1.0))
        assert keeper.wait(30)
        fed.feed(part(11, 2.0))
        until(lambda: shelf.current() == 2)
        assert (value(shelf, 2), value(shelf, 2, "1.bias")) == (2.0, 1.0)
        assert shelf.where(2)["1.bias"] == shelf.where(1)["1.bias"]  # it was not written again
        fed.feed(Update(12, time.time(), {}, whole=False))  # in which nothing is new: no version of ours
        until(lambda: keeper.state().source.startswith("follows run digits, version 12, "))
        state = keeper.state()
        assert [(v.number, v.source_version) for v in state.versions] == [(1, 10), (2, 11)]
        assert not state.lost
        assert not state.refusals


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (Update(2, 0.0, {"0.weight": torch.zeros(3, 3)}, False), "'0.weight' is 3x3, in the model it is 2x2"),
        (Update(2, 0.0, {"0.weight": torch.full((2, 2), float("nan"))}, False), "not finite"),
        (Update(2, 0.0, {"0.weight": torch.zeros(2, 2).double()}, False), "torch.float64"),
        (Update(2, 0.0, {"0.weight": torch.zeros(2, 2)}, True), "are missing"),
        (Update(2, 0.0, {"0.wieght": torch.zeros(2, 2)}, False), "did you mean '0.weight'"),
        (Update(2, 0.0, {"other": torch.zeros(1)}, True, partly=True), "nothing of the model"),
        (Unfit("file x is torn"), "file x is torn"),
    ],
)
def test_what_does_not_fit_is_refused_and_serving_goes_on(tmp_path: Path, update: Any, reason: str) -> None:
    fed, shelf = Fed(), Shelf(tmp_path)
    with kept(tmp_path, fed) as keeper:
        fed.feed(whole(1, 1.0))
        until(lambda: shelf.current() == 1)
        fed.feed(update)
        until(lambda: keeper.state().refusals)
        assert reason in keeper.state().refusals[-1].reason
        assert (shelf.current(), value(shelf, 1)) == (1, 1.0)
        if isinstance(update, Update) and not update.whole and "0.weight" in update.tensors:
            fed.feed(part(3, 5.0, "1.bias"))  # what was wrong is still in it
            until(lambda: len(keeper.state().refusals) == 2)
        fed.feed(whole(4, 4.0))
        until(lambda: shelf.current() == 2)
        assert value(shelf, 2) == 4.0


def test_what_servers_do_not_have_is_as_the_model_was_made_and_told(tmp_path: Path) -> None:
    fed, shelf = Fed(), Shelf(tmp_path)
    with kept(tmp_path, fed) as keeper:
        fed.feed(Update(1, 0.0, {"0.weight": torch.ones(2, 2), "table1.x": torch.ones(1)}, True, partly=True))
        until(lambda: shelf.current() == 1)
        assert torch.equal(shelf.read(1)["1.running_var"], torch.ones(2))
        assert "as the model was made: '1.weight', '1.bias', '1.running_mean' and 2 more" in keeper.state().note


def test_frozen_parameters_are_waited_for_where_they_will_come(tmp_path: Path) -> None:
    """What the factory makes there is random; buffers may be as they were made."""
    fed, shelf, said = Fed(), Shelf(tmp_path), list[str]()
    with kept(tmp_path, fed, say=said.append) as keeper:
        for version in (1, 2):
            served = {"1.weight": torch.ones(2), "1.bias": torch.ones(2)}
            fed.feed(Update(version, 0.0, served, version == 1, partly=True, awaits="waits for its first checkpoint"))
        until(lambda: "version 2," in keeper.state().source)
        assert "waits for its first checkpoint: '0.weight' is on no server" in keeper.state().source
        assert (shelf.current(), keeper.state().refusals, len(said)) == (0, [], 1)
        fed.feed(Update(2, 0.0, {"0.weight": torch.full((2, 2), 7.0)}, False, partly=True, awaits="waits"))
        until(lambda: shelf.current() == 1)
        assert (value(shelf, 1), value(shelf, 1, "1.bias")) == (7.0, 1.0)
        assert "waits" not in keeper.state().source


def test_a_lost_source_is_looked_for_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed, shelf, said = Fed(), Shelf(tmp_path), list[str]()
    monkeypatch.setattr(keeper_module, "_LATER_S", 0.05)
    with kept(tmp_path, fed, say=said.append) as keeper:
        fed.feed(whole(1, 1.0))
        until(lambda: shelf.current() == 1)
        fed.lost = Interrupted("nobody listens")
        until(lambda: keeper.state().lost)
        words = keeper.state().source
        assert words.startswith("run digits is gone since ")
        assert words.endswith("(nobody listens): serving goes on with version 1")
        asked = fed.asked
        until(lambda: fed.asked > asked + 3)
        assert len([line for line in said if "gone" in line]) == 1
        fed.lost = None
        fed.feed(part(2, 2.0))
        until(lambda: shelf.current() == 2)
        assert not keeper.state().lost
        assert "run digits is there again" in said
        fed.ended = "finished"
        assert keeper.state().source == "run digits is over (finished): serving goes on with version 2"


def test_a_source_that_was_never_there_is_said(tmp_path: Path) -> None:
    fed, shelf, said = Fed(), Shelf(tmp_path), list[str]()
    fed.lost = Interrupted("no such file")
    with kept(tmp_path, fed, say=said.append) as keeper:
        until(lambda: keeper.state().lost)
        told = "run digits cannot be reached (no such file): there is nothing to serve yet"
        assert keeper.state().source == told
        assert said == ["run digits cannot be reached (no such file): it is looked for"]
        fed.lost = None
        fed.feed(whole(1, 1.0))
        until(lambda: shelf.current() == 1)


def test_orders(tmp_path: Path) -> None:
    fed, shelf = Fed(), Shelf(tmp_path)
    with kept(tmp_path, fed) as keeper:
        for order in (keeper.roll_back, lambda: keeper.pin(1), lambda: keeper.pin(0)):
            with pytest.raises(ConfigError):
                order()
        for number in (1, 2, 3):
            fed.feed(whole(number, float(number)))
            until(lambda number=number: shelf.current() == number)  # type: ignore[misc]
        keeper.pin(1)
        assert shelf.current() == 1
        for number in range(4, 9):  # more than are kept
            fed.feed(whole(number, float(number)))
            until(lambda number=number: keeper.state().versions[-1].number == number)  # type: ignore[misc]
        assert shelf.current() == 1
        assert [v.number for v in keeper.state().versions] == [1, 6, 7, 8]
        with pytest.raises(ConfigError, match="version 1 is pinned"):
            keeper.roll_back()
        keeper.unpin()
        assert shelf.current() == 8
        keeper.roll_back()
        assert (shelf.current(), keeper.state().paused) == (7, True)
        fed.feed(whole(9, 9.0))
        keeper.roll_back()
        assert shelf.current() == 6
        keeper.resume()  # 7 and 8 were rolled back: the next one counts
        until(lambda: shelf.current() == 9)
        assert value(shelf, 9) == 9.0
        keeper.pause()
        until(lambda: not fed.asked or _settled(fed))
        fed.feed(whole(10, 10.0))
        asked = fed.asked
        time.sleep(0.1)
        assert (fed.asked, shelf.current()) == (asked, 9)
        keeper.resume()
        until(lambda: shelf.current() == 10)


def test_no_roll_back_ends_at_a_version_that_was_rolled_back(tmp_path: Path) -> None:
    fed, shelf = Fed(), Shelf(tmp_path)
    with kept(tmp_path, fed) as keeper:
        for number in (1, 2, 3):
            fed.feed(whole(number, float(number)))
            until(lambda number=number: shelf.current() == number)  # type: ignore[misc]
        keeper.roll_back()  # 3 is withdrawn
        keeper.resume()
        fed.feed(whole(4, 4.0))
        until(lambda: shelf.current() == 4)
        keeper.roll_back()
        assert shelf.current() == 2
        keeper.pin(3)
        keeper.unpin()
        keeper.resume()
        keeper.pin(4)
        keeper.unpin()
        assert shelf.current() == 2  # 3 and 4 were withdrawn: unpinned, the newest of the others is served


def _settled(fed: Fed) -> bool:
    """Whether nobody asks any more."""
    asked = fed.asked
    time.sleep(0.1)
    return fed.asked == asked


def test_another_start_with_the_same_directory_goes_on(tmp_path: Path) -> None:
    fed, shelf = Fed(), Shelf(tmp_path)
    with kept(tmp_path, fed) as keeper:
        for number in (1, 2, 3):
            fed.feed(whole(number, float(number)))
            until(lambda number=number: shelf.current() == number)  # type: ignore[misc]
        keeper.roll_back()
    with kept(tmp_path, fed := Fed()) as keeper:
        fed.feed(whole(7, 7.0))
        assert (shelf.current(), keeper.state().paused) == (2, True)  # orders outlive it
        keeper.resume()
        until(lambda: shelf.current() == 4)
        assert value(shelf, 4) == 7.0
    path = tmp_path / "tensors-00000004.safetensors"
    path.write_bytes(path.read_bytes()[:-5])  # the disk has lost its end
    with kept(tmp_path, Fed()) as keeper:
        state = keeper.state()
        assert "tensors-00000004" in state.refusals[0].reason
        assert [v.number for v in state.versions] == [2, 3]
        assert state.current == 2  # 3 was rolled back


def test_what_was_ordered_outlives_the_shelf(tmp_path: Path) -> None:
    place, said = tmp_path / "orders", list[str]()
    shelves = [Shelf(tmp_path / name, keep=3) for name in "abcd"]

    def server(shelf: Shelf, fed: Fed) -> contextlib.AbstractContextManager[Keeper]:
        return kept(shelf.directory, fed, kept=Kept(place), say=said.append)

    with server(shelves[0], fed := Fed()) as keeper:
        for number in (1, 2, 3):
            fed.feed(part(number, float(number)) if number > 1 else whole(number, 1.0))
            until(lambda number=number: shelves[0].current() == number)  # type: ignore[misc]
        assert not place.exists()  # nothing is ordered
        keeper.pin(2)
        assert not keeper.state().note
    for number in (7, 8):  # twice: it goes on being kept
        del said[:]
        with server(shelf := shelves[number - 6], fed := Fed()) as keeper:
            assert (shelf.current(), keeper.state().pinned) == (2, 2)
            assert (value(shelf, 2), value(shelf, 2, "1.bias")) == (2.0, 1.0)  # which lie in two files
            assert said == ["serves version 2, which was pinned before this start, until it is unpinned"]
            fed.feed(whole(number, float(number)))
            until(lambda: len(keeper.state().versions) == 2)
            assert shelf.current() == 2  # its source has only newer ones
            assert keeper.state().versions[-1].number == 3
            if number == 8:
                keeper.unpin()
                assert (shelf.current(), place.exists()) == (3, False)
                keeper.roll_back()
                assert (shelf.current(), place.exists()) == (2, True)
    with server(shelves[3], fed := Fed()) as keeper:
        assert (shelves[3].current(), keeper.state().paused) == (2, True)
        keeper.resume()
        assert not place.exists()
        fed.feed(whole(9, 9.0))
        until(lambda: shelves[3].current() == 4)  # no number that had another meaning before
        keeper.pause()
        keeper.pin(2)
        keeper.resume()  # it is pinned still
        assert [version.number for version in Shelf(place).versions()] == [2]


def test_a_pinned_version_that_is_not_there_any_more_is_told(tmp_path: Path) -> None:
    place = tmp_path / "orders"
    with kept(tmp_path / "a", fed := Fed(), kept=Kept(place)) as keeper:
        fed.feed(whole(1, 1.0))
        until(lambda: keeper.state().current == 1)
        keeper.pin(1)
    good = tmp_path / "good"
    shutil.copytree(place, good)

    def gone() -> None:
        (place / "version-00000001.json").unlink()

    def torn() -> None:
        path = place / "tensors-00000001.safetensors"
        path.write_bytes(path.read_bytes()[:-5])

    def other_model() -> None:
        Shelf(place).put(Version(number=1, source_version=1, made_at=0.0), {"other": torch.zeros(1)})

    def garbage() -> None:
        (place / "orders.json").write_text("{")

    cannot = "version 1, which was pinned before this start, cannot be served: run digits is followed"
    ways = {gone: cannot, torn: cannot, other_model: cannot, garbage: "what was ordered before does not count, since"}
    for number, (spoil, told) in enumerate(ways.items()):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(good, place)
        spoil()
        said: list[str] = []
        with kept(tmp_path / str(number), fed := Fed(), kept=Kept(place), say=said.append) as keeper:
            assert any(line.startswith(told) for line in said), (spoil, said)
            assert keeper.state().pinned is None
            fed.feed(whole(5, 5.0))
            until(lambda: keeper.state().current > 0)
            number = keeper.state().current
            assert place.exists()  # for a start with the model that it is of
            keeper.pin(number)
            assert Shelf(place).orders().pinned == number
            keeper.unpin()
            assert not place.exists()


def test_orders_that_cannot_be_kept_count_and_say_so(tmp_path: Path) -> None:
    place = tmp_path / "orders"
    with kept(tmp_path / "a", fed := Fed(), kept=Kept(place)) as first:
        fed.feed(whole(1, 1.0))
        until(lambda: first.state().current == 1)
        first.pin(1)
        for number, (where, why) in enumerate(
            [
                (place, f"another one has {place}"),
                (None, "--orders DIR keeps it"),
                (tmp_path / "no" / "where", "cannot be"),
            ]
        ):
            with kept(tmp_path / f"shelf-{number}", fed := Fed(), kept=Kept(where)) as other:
                assert other.state().pinned == (1 if where == place else None)  # it begins with what is kept
                fed.feed(whole(2, 2.0))
                until(lambda other=other: other.state().versions[-1:])  # type: ignore[misc]
                other.unpin()
                other.pause()
                assert (other.state().paused, why in other.state().note) == (True, True), other.state().note
                other.resume()
                assert not other.state().note or where == place
        assert Shelf(place).orders().pinned == 1
        assert value(Shelf(place), 1) == 1.0


def test_a_pause_before_there_was_a_version_is_kept_and_told(tmp_path: Path) -> None:
    with kept(tmp_path / "a", Fed(), kept=Kept(tmp_path / "orders")) as keeper:
        keeper.pause()
    said: list[str] = []
    with kept(tmp_path / "b", fed := Fed(), kept=Kept(tmp_path / "orders"), say=said.append) as keeper:
        fed.feed(whole(1, 1.0))
        assert said == ["serves nothing until it is resumed"]
        assert "paused before there was a version: resume it" in keeper.state().source
        keeper.resume()
        until(lambda: keeper.state().current == 1)


def test_at_most_one_version_in_so_many_seconds(tmp_path: Path) -> None:
    fed, shelf = Fed(), Shelf(tmp_path)
    with kept(tmp_path, fed, rules=Rules(every_s=1e6)):
        fed.feed(whole(1, 1.0))
        fed.feed(whole(2, 2.0))
        until(lambda: shelf.current() == 1)
        assert _settled(fed)
        assert not fed.empty


def first_weight(model: nn.Module, batches: list[Any]) -> float:
    return float(model[0].weight[0, 0])  # type: ignore[index]


def test_only_what_is_not_worse_on_the_holdout_is_served(tmp_path: Path) -> None:
    fed, shelf = Fed(), Shelf(tmp_path)
    holdout = Holdout([(torch.zeros(1, 2), torch.zeros(1))], first_weight, tolerance=0.5)
    with kept(tmp_path, fed, holdout=holdout) as keeper:
        for version, (metric, served) in enumerate([(1.0, 1), (2.0, 2), (1.4, 2), (1.6, 3), (1.2, 3), (2.5, 4)]):
            fed.feed(part(version, metric) if version else whole(version, metric))
            until(lambda version=version: len(keeper.state().metrics) == version + 1)  # type: ignore[misc]
            until(lambda served=served: shelf.current() == served)  # type: ignore[misc]
        refused = keeper.state().refusals
        assert [(r.source_version, r.metric, r.best) for r in refused] == [
            (2, pytest.approx(1.4), 2.0),
            (4, pytest.approx(1.2), 2.0),  # not against the 1.6 before it: many small falls are one large
        ]
        assert "first_weight 1.4 on the holdout, after 2" in refused[0].reason
        assert [m.number for m in keeper.state().metrics] == [1, 2, None, 3, None, 4]


def test_a_metric_that_is_not_finite_bars_no_later_version(tmp_path: Path) -> None:
    """Of a first version, of one that is rolled back to, and of one that was served before there was a holdout."""
    values = {1.0: float("nan"), 2.0: 0.5, 3.0: float("nan"), 4.0: 0.4, 5.0: 0.6}
    holdout = Holdout(
        [(torch.zeros(1, 2), torch.zeros(1))], lambda model, batches: values[first_weight(model, batches)]
    )
    fed, shelf = Fed(), Shelf(tmp_path)
    with kept(tmp_path, fed):
        fed.feed(whole(1, 1.0))
        until(lambda: shelf.current() == 1)
    fed = Fed()
    with kept(tmp_path, fed, holdout=holdout) as keeper:
        fed.feed(whole(2, 2.0))
        until(lambda: shelf.current() == 2)
        for number, weight in ((3, 3.0), (4, 4.0)):  # nan, and less than 0.5: both are worse
            fed.feed(whole(number, weight))
            until(lambda number=number: len(keeper.state().refusals) == number - 2)  # type: ignore[misc]
        assert shelf.current() == 2
        keeper.roll_back()
        keeper.resume()
        fed.feed(whole(5, 5.0))
        until(lambda: shelf.current() == 3)


def test_a_version_from_before_there_was_a_holdout_is_measured(tmp_path: Path) -> None:
    fed, shelf = Fed(), Shelf(tmp_path)
    with kept(tmp_path, fed):
        fed.feed(whole(1, 3.0))
        until(lambda: shelf.current() == 1)
    fed = Fed()
    with kept(tmp_path, fed, holdout=Holdout([(torch.zeros(1, 2), torch.zeros(1))], first_weight)) as keeper:
        fed.feed(whole(2, 2.0))
        until(lambda: keeper.state().refusals)
        assert (keeper.state().refusals[0].metric, keeper.state().refusals[0].best) == (2.0, 3.0)
        assert shelf.current() == 1


def test_a_holdout_that_fails_is_told_and_serving_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "_LATER_S", 0.05)
    calls = []

    def fails(model: nn.Module, batches: list[Any]) -> float:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no such class")
        return 1.0

    fed, shelf = Fed(), Shelf(tmp_path)
    with kept(tmp_path, fed, holdout=Holdout([(torch.zeros(1, 2), torch.zeros(1))], fails)) as keeper:
        fed.feed(whole(1, 1.0))
        until(lambda: shelf.current() == 1)
        fed.feed(whole(2, 2.0))
        until(lambda: keeper.state().refusals)
        assert keeper.state().refusals[0].reason == "ValueError: no such class"
        fed.feed(whole(3, 3.0))
        until(lambda: shelf.current() == 2)


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_an_empty_holdout_is_said(metric: str) -> None:
    x, y = torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)
    for data in ((x, y), torch.utils.data.TensorDataset(x, y), [(x, y), (x, y)], []):
        with pytest.raises(ConfigError, match="the holdout is empty"):
            Holdout(data, metric)


def test_metrics_of_models() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.eye(2)
    x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1, 0, 0])
    data = torch.utils.data.TensorDataset(x, y)
    for given in ((x, y), data, [(x[:3], y[:3]), (x[3:], y[3:])], iter([(x, y)])):
        assert Holdout(given).measure(model) == 0.75
    loss = Holdout((x, y), "loss")
    expected = float(torch.nn.functional.cross_entropy(model(x).detach(), y))
    assert loss.measure(model) == pytest.approx(expected)
    assert loss.is_good(1.0, 1.0)
    assert loss.is_good(0.9, 1.0)
    assert not loss.is_good(1.1, 1.0)
    assert not loss.is_good(float("nan"), 1.0)
    assert Holdout((x, x), "loss").measure(model) == 0.0
    assert model.training
    for wrong, message in [
        (lambda: Holdout((x, y), "acuracy"), "did you mean 'accuracy'"),
        (lambda: Holdout([]), "empty"),
        (lambda: Holdout([x]), "batch of the holdout is a Tensor"),
        (lambda: Holdout(3), "is a int"),
        (lambda: Holdout((x, y), tolerance=-1), "tolerance=-1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            wrong()


class Orders(RuleBasedStateMachine):
    """Any sequence of versions and orders. Each version has its metric as its value."""

    @initialize(tolerance=st.sampled_from([0.0, 0.25]))
    def begin(self, tolerance: float) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="paceline-keeper-"))
        self.tolerance = tolerance
        self.version = 0
        self.last = 0.0
        self.open()

    def open(self) -> None:
        self.fed, self.fed_last = Fed(), 0
        holdout = Holdout([(torch.zeros(1, 2), torch.zeros(1))], first_weight, self.tolerance)
        self.shelf = Shelf(self.directory, keep=3)
        self.keeper = Keeper(self.shelf, self.fed, model=net(), holdout=holdout)
        self.keeper.start()
        self.before = self.keeper.state()

    @rule(metric=st.integers(0, 8), good=st.booleans())
    def comes(self, metric: int, good: bool) -> None:
        """A version, perhaps one that cannot be used."""
        before, self.version = self.keeper.state(), self.version + 1
        self.fed_last = self.version
        self.fed.feed(whole(self.version, metric / 4 if good else float("nan")))
        if before.paused:
            assert _still(lambda: self.keeper.state().versions == before.versions)
            return
        self.settled()

    def judged(self, version: int) -> bool:
        state = self.keeper.state()
        return any(r.source_version == version for r in state.refusals) or any(
            v.source_version == version for v in state.versions
        )

    def settled(self) -> None:
        """All that came is judged."""
        if not self.keeper.state().paused:
            until(lambda: not self.fed_last or self.judged(self.fed_last))

    @precondition(lambda self: self.keeper.state().versions)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([v.number for v in self.keeper.state().versions]))
        self.keeper.pin(number)
        assert (self.keeper.state().current, self.keeper.state().pinned) == (number, number)

    @rule()
    def unpin(self) -> None:
        self.keeper.unpin()
        assert self.keeper.state().pinned is None

    @rule()
    def pause(self) -> None:
        before = self.shelf.current()
        self.keeper.pause()
        assert self.shelf.current() == before

    @rule()
    def resume(self) -> None:
        self.keeper.resume()
        self.settled()

    @rule()
    def roll_back(self) -> None:
        before = self.keeper.state()
        withdrawn = self.shelf.orders().withdrawn
        older = [v.number for v in before.versions if v.number < before.current and v.number not in withdrawn]
        if before.pinned is not None or not older:
            with pytest.raises(ConfigError):
                self.keeper.roll_back()
            assert self.shelf.current() == before.current
            return
        self.keeper.roll_back()
        after = self.keeper.state()
        assert (after.current, after.paused) == (older[-1], True)

    @rule()
    def starts_again(self) -> None:
        before = self.keeper.state()
        self.keeper.close()
        self.open()
        after = self.keeper.state()
        assert (after.current, after.pinned, after.paused) == (before.current, before.pinned, before.paused)
        assert [v.number for v in after.versions] == [v.number for v in before.versions]

    @invariant()
    def what_is_served_is_whole_and_on_the_shelf(self) -> None:
        state = self.keeper.state()
        numbers = [v.number for v in state.versions]
        assert numbers == sorted(set(numbers))
        assert len(numbers) <= self.shelf.keep + 2
        if not state.current:
            assert not numbers
            return
        assert state.current in numbers
        found = self.shelf.read(state.current)
        values = {float(v) for tensor in found.values() if tensor.is_floating_point() for v in tensor.view(-1)}
        metric = next(v.metric for v in state.versions if v.number == state.current)
        assert values == {metric}

    @invariant()
    def orders_win(self) -> None:
        before, state = self.before, self.keeper.state()
        self.before = state
        if state.pinned is not None:
            assert state.current == state.pinned
        by_number = {v.number: v.metric for v in (*before.versions, *state.versions)}
        newer = before.current and state.current > max([v.number for v in before.versions], default=0)
        if newer and not before.paused and before.pinned is None:  # promoted, by itself
            was, now = by_number[before.current], by_number[state.current]
            assert was is not None
            assert now is not None
            assert now >= was - self.tolerance

    def teardown(self) -> None:
        if hasattr(self, "keeper"):
            self.keeper.close()
            shutil.rmtree(self.directory)


def _still(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        if not holds():
            return False
        time.sleep(0.01)
    return True


Orders.TestCase.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOrders = Orders.TestCase
