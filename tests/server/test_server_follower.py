"""Followers at real desks: exact ones are bit-identical, coded ones within the bound, and what is unchanged is free."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from _house import TOKEN, house, training, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.codecs import make_codec
from paceline.core.errors import ConfigError, Interrupted, TimedOut
from paceline.server.client import Table
from paceline.server.outside import copies as copies_module
from paceline.server.outside import desk as desk_module
from paceline.server.outside import visits as v
from paceline.server.outside.changes import chunks_of
from paceline.server.outside.follower import Follower
from paceline.server.outside.outsider import Outsider
from paceline.server.placement import Tensor

ROWS = 512  # of the table of which only some are touched
TENSORS = [
    Tensor("table", (ROWS, 1024), "float32", 0),  # 2 MB: 32 blocks
    Tensor("head.weight", (33, 65), "float32", 0),
    Tensor("head.scale", (), "float32", 0),
    Tensor("half", (129,), "float64", 0),
]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_PAUSE", 0.0)  # on a busy machine a copy may take long


def touch(table: Table, rows: slice, seed: int, scale: float = 1.0) -> None:
    """A push that changes these rows of the table, and the head."""
    made = torch.Generator().manual_seed(seed)
    gradients = [torch.zeros(slot.parameter.shape, dtype=slot.parameter.dtype) for slot in table.slots]
    gradients[0][rows] = scale * torch.randn(gradients[0][rows].shape, generator=made)
    gradients[1][:] = scale * torch.randn(gradients[1].shape, generator=made)
    table.push(gradients, [{"lr": 1.0}], weight=1.0)


def whole(outsider: Outsider) -> dict[str, torch.Tensor]:
    weights = outsider.weights()
    assert weights is not None
    return dict(weights)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    raw = [{n: t.reshape(-1).view(torch.uint8) for n, t in each.items()} for each in (one, other)]
    return one.keys() == other.keys() and all(torch.equal(raw[0][n], raw[1][n]) for n in one)


def following(outsider: Outsider, follower: Follower, held: dict[str, torch.Tensor]) -> int:
    """Take the next version; the bytes that came."""
    update = follower.next(10.0)
    assert update is not None
    held.update(update.tensors)
    return update.nbytes


steps = st.lists(
    st.tuples(st.integers(0, ROWS - 1), st.integers(0, 40), st.sampled_from([0.0, 1e-6, 1.0])), min_size=1, max_size=6
)


@pytest.mark.parametrize("servers", [1, 2])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=steps)
def test_an_exact_follower_is_bit_identical_after_any_versions(
    tmp_path: Path, servers: int, plan: list[tuple[int, int, float]]
) -> None:
    with house(tmp_path, servers=servers) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        (table,) = here.open(0.5, TENSORS)
        with outsider.follow() as follower:
            held: dict[str, torch.Tensor] = {}
            following(outsider, follower, held)
            assert same(held, whole(outsider))
            for seed, (row, count, scale) in enumerate(plan):
                before = {name: tensor.clone() for name, tensor in held.items()}
                touch(table, slice(row, row + count), seed, scale)
                update = follower.next(10.0)
                assert update is not None
                assert update.version == seed + 1
                held.update(update.tensors)
                assert same(held, whole(outsider))
                assert same(dict(follower.weights()), held)
                for name in held.keys() - update.tensors.keys():
                    assert torch.equal(before[name], held[name])


def test_what_did_not_change_costs_nothing(tmp_path: Path) -> None:
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        (table,) = here.open(0.5, TENSORS)
        with outsider.follow() as follower, outsider.follow(codec="quantize(8)") as coded:
            held: dict[str, torch.Tensor] = {}
            first = following(outsider, follower, held)
            assert first >= sum(t.nbytes for t in TENSORS)
            following(outsider, coded, {})
            touch(table, slice(0, 0), 1, scale=0.0)  # a version in which nothing is new
            for each in follower, coded:
                update = each.next(10.0)
                assert update is not None
                assert (update.version, update.tensors, update.nbytes) == (1, {}, 0)
            touch(table, slice(100, 101), 1)  # one row of 4 KiB, and the head
            few = following(outsider, follower, held)
            assert few <= 4 * v.BLOCK_BYTES  # its block, and those of the head
            assert same(held, whole(outsider))


@pytest.mark.parametrize("words", ["quantize(8)", "topk(0.01)", "sign", "cast(bf16)", "quantize(4, stochastic=True)"])
def test_a_coded_follower_stays_within_the_bound_and_the_bytes(tmp_path: Path, words: str) -> None:
    codec = make_codec(words)
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        (table,) = here.open(0.5, TENSORS)
        with outsider.follow(codec=words) as follower:
            held: dict[str, torch.Tensor] = {}
            following(outsider, follower, held)
            assert same(held, whole(outsider))  # the first one is exact
            parts = follower._pinned[0].parts
            numels = [c.numel for part in parts for c in chunks_of(part) if c.dtype == "float32"]
            for seed in range(12):
                touch(table, slice(0, ROWS), seed, scale=10.0 ** -(seed % 3))
                before = {name: tensor.clone() for name, tensor in held.items()}
                nbytes = following(outsider, follower, held)
                now = whole(outsider)
                assert nbytes == sum(map(codec.nbytes, numels))
                for name in ("table", "head.weight", "head.scale"):
                    # Against the largest way that any element had to go: errors of earlier versions are in it.
                    bound = codec.bound(torch.cat([(now[n] - before[n]).view(-1) for n in now if n != "half"]))
                    assert float((now[name] - held[name]).abs().max()) <= bound * (1 + 1e-5) + 1e-6
                assert torch.equal(now["half"], held["half"])  # of another type: as it is


def test_errors_of_a_coded_follower_die_away_where_training_stands_still(tmp_path: Path) -> None:
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        (table,) = here.open(0.5, TENSORS)
        with outsider.follow(codec="quantize(8)") as follower:
            held: dict[str, torch.Tensor] = {}
            following(outsider, follower, held)
            touch(table, slice(0, ROWS), 1)
            following(outsider, follower, held)
            off = float((whole(outsider)["table"] - held["table"]).abs().max())
            assert off > 0
            for _ in range(3):
                touch(table, slice(0, 0), 2, scale=0.0)
                following(outsider, follower, held)
            assert float((whole(outsider)["table"] - held["table"]).abs().max()) < off / 100


def test_values_that_are_not_finite_come_as_they_are(tmp_path: Path) -> None:
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        (table,) = here.open(0.5, TENSORS)
        with outsider.follow(codec="topk(0.01)") as follower:
            held: dict[str, torch.Tensor] = {}
            following(outsider, follower, held)
            here.services[0].still(lambda: here.services[0].tables[0].shard.stock.weights[0].fill_(float("nan")))
            touch(table, slice(0, 0), 1, scale=0.0)
            following(outsider, follower, held)
            assert same(held, whole(outsider))
            assert bool(held["table"].isnan().any())


def test_a_cut_follower_comes_back_and_needs_only_what_it_lacks(tmp_path: Path) -> None:
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        (table,) = here.open(0.5, TENSORS)
        with outsider.follow() as follower, outsider.follow(codec="quantize(8)") as coded:
            held: dict[str, torch.Tensor] = {}
            mine: dict[str, torch.Tensor] = {}
            following(outsider, follower, held)
            following(outsider, coded, mine)
            touch(table, slice(3, 4), 1)
            following(outsider, coded, mine)
            for place in here.desks[0]._seated()[1:]:  # but for the one that reads the weights
                place.channel.close()
            touch(table, slice(3, 4), 2)
            for each in follower, coded:
                with pytest.raises(Interrupted, match="is over, or cannot be reached any more"):
                    each.next(5.0)
            assert following(outsider, follower, held) <= 4 * v.BLOCK_BYTES
            assert following(outsider, coded, mine) >= sum(t.nbytes for t in TENSORS)  # all, since the desk forgot
            now = whole(outsider)
            assert same(held, now)
            assert same(mine, now)
            touch(table, slice(3, 4), 3)
            assert following(outsider, coded, mine) < 700_000
            with outsider.follow(held=follower.held) as other:  # one that takes over
                update = other.next()
                assert update is not None
                assert update.whole
                assert update.nbytes <= 4 * v.BLOCK_BYTES
                assert same(update.tensors, whole(outsider))


def test_a_wait_for_the_next_version_ends_with_it_and_at_its_limit(tmp_path: Path) -> None:
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        (table,) = here.open(0.5, TENSORS)
        with outsider.follow() as follower:
            assert follower.next() is not None
            began = time.monotonic()
            assert follower.next(0.3) is None
            assert time.monotonic() - began >= 0.3
            asked = []
            waits = threading.Thread(target=lambda: asked.append(follower.next(10.0)), daemon=True)
            waits.start()
            until(lambda: any(place.busy for place in here.desks[0]._seated()))
            assert not asked
            touch(table, slice(0, 1), 1)
            pushed = time.time()
            waits.join(10.0)
            assert asked[0] is not None
            assert asked[0].version == 1
            assert asked[0].made_at <= pushed


def test_following_while_several_train_is_of_one_version_in_sync(tmp_path: Path) -> None:
    with house(tmp_path, servers=3) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        tables = here.open()
        with outsider.follow() as follower, training(tables):
            for _ in range(4):
                update = follower.next(10.0)
                assert update is not None
                assert not update.mixed
                assert all((tensor == update.version).all() for tensor in follower.weights().values())


def test_only_so_many_follow_with_a_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "MAX_TRACES", 1)
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        (table,) = here.open(0.5, TENSORS)
        with outsider.follow(codec="sign") as first, outsider.follow(codec="sign") as second:
            assert first.next() is not None
            with pytest.raises(ConfigError, match="1 others follow with a codec already"):
                second.next()
            touch(table, slice(0, 9), 7)
            assert first.next() is not None
            first.close()
            until(lambda: len(here.desks[0]._seated()) <= 1)
            assert second.next() is not None  # there is room again
        with pytest.raises(ConfigError, match="did you mean 'quantize'"):
            outsider.follow(codec="quantise(8)")
        with pytest.raises(ConfigError, match="for gradients, whose momentum it keeps"):
            outsider.follow(codec="dgc(0.01)")


def test_copies_for_followers_keep_to_their_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_PAUSE", 1e9)  # the next copy is never due
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 0.5) as outsider:
        (table,) = here.open(0.5, TENSORS)
        with outsider.follow() as follower:
            assert follower.next() is not None
            touch(table, slice(0, 9), 7)
            with pytest.raises(TimedOut):
                follower.next(0.1)


def test_a_server_that_was_looked_at_still_tells_how_far_it_is(tmp_path: Path) -> None:
    """What was called with every push before goes on being called."""
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        called: list[int] = []
        here.services[0].look = lambda: called.append(1)
        (table,) = here.open(0.5, TENSORS)
        whole(outsider)
        before = len(called)
        touch(table, slice(0, 9), 7)
        assert len(called) > before


def test_a_run_that_was_started_again_is_followed_from_its_beginning(tmp_path: Path) -> None:
    with house(tmp_path) as here, Outsider(here.address, TOKEN, 20.0) as outsider:
        (table,) = here.open(0.5, TENSORS)
        for seed in range(3):
            touch(table, slice(0, 5), seed)
        with outsider.follow() as follower:
            assert follower.next() is not None
            # As of another start at the same address: a lower version.
            here.services[0].still(lambda: setattr(here.services[0].tables[0].shard, "version", 1))
            update = follower.next(0.2)
            assert update is not None
            assert update.version == 1
