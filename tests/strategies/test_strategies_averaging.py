"""Averages: their weights add up, zero is zero, and what is bad about a member does not reach the others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, PacelineError
from paceline.strategies.averaging import AVERAGES, ByLoss, Median, Seen, Trimmed, combine_rows, make_average
from paceline.strategies.reducers import Coder, Method, Reducer
from paceline.strategies.reducers.coder import Piece
from paceline.testing.together import together
from paceline.transport.group import Group

_NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)
_AMOUNTS = st.floats(0, 1e9)
_SEEN = st.builds(Seen, sound=st.booleans(), samples=_AMOUNTS, tokens=_AMOUNTS, loss=_NUMBERS)


@settings(deadline=None)
@given(name=st.sampled_from(sorted(AVERAGES)), seen=st.lists(_SEEN, min_size=1, max_size=6))
def test_weights_add_up_to_one_and_who_is_not_sound_has_none(name: str, seen: list[Seen]) -> None:
    average = make_average(name)
    try:
        weights = average.weigh(seen)
    except PacelineError:
        usable = [s for s in seen if s.sound and (name != "loss" or math.isfinite(s.loss))]
        assert not usable or (name == "tokens" and not any(s.tokens > 0 for s in seen))
        return
    assert math.isclose(sum(weights), 1.0, rel_tol=1e-9)
    for weight, member in zip(weights, seen):
        assert weight >= 0
        assert member.sound or weight == 0
        assert name != "loss" or math.isfinite(member.loss) or weight == 0


@settings(deadline=None)
@given(losses=st.lists(st.floats(-50, 50), min_size=2, max_size=5), temperature=st.floats(0.05, 10))
def test_loss_weights_are_a_softmax(losses: list[float], temperature: float) -> None:
    weights = ByLoss(temperature).weigh([Seen(loss=loss) for loss in losses])
    expected = torch.softmax(-torch.tensor(losses, dtype=torch.float64) / temperature, dim=0)
    torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), expected)


_ROWS = st.integers(1, 3).flatmap(
    lambda bad: st.tuples(
        st.just(bad),
        st.lists(
            st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), min_size=2 * bad + 1 - bad, max_size=7
        ),
        st.lists(st.lists(_NUMBERS, min_size=3, max_size=3), min_size=bad, max_size=bad),
    )
)


@settings(max_examples=200, deadline=None)
@given(rows=_ROWS, robust=st.sampled_from(["median", "trimmed"]), seed=st.integers(0, 99))
def test_bad_members_leave_the_result_among_the_good_ones(
    rows: tuple[int, list[list[float]], list[list[float]]], robust: str, seed: int
) -> None:
    """Whatever a minority says, be it nan or huge, each element stays between the least and the most of the others."""
    num_bad, good, bad = rows
    average = Median() if robust == "median" else Trimmed(num_bad)
    everyone = torch.tensor(good + bad)[torch.randperm(len(good) + len(bad), generator=_seeded(seed))]
    result = combine_rows(everyone, average.combine, [1.0] * len(everyone))
    honest = torch.tensor(good)
    slack = 1e-4 * honest.abs().max()
    assert bool((result >= honest.amin(0) - slack).all())
    assert bool((result <= honest.amax(0) + slack).all())


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(deadline=None)
@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9))
def test_the_median_is_the_middle_one_and_without_outliers_trimming_is_a_mean(values: list[float]) -> None:
    rows = torch.tensor(values)[:, None]
    middle = torch.quantile(rows.double(), 0.5, dim=0, interpolation="midpoint")
    torch.testing.assert_close(Median().combine(rows).double(), middle, rtol=1e-4, atol=1e-3)
    same = torch.full((5, 2), values[0])
    torch.testing.assert_close(Trimmed(2).combine(same), same[0])


@pytest.mark.parametrize("hosts", [["a"] * 4, ["a", "a", "b", "b"]])
@pytest.mark.parametrize("words", ["none", "quantize(8)"])
def test_rows_are_gathered_stretch_by_stretch(words: str, hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where members share a host, each counts for itself; with a codec, each one's message is decoded apart."""
    monkeypatch.setattr("paceline.strategies.reducers.rows.STRETCH", 1000)
    values = [torch.linspace(-1, 1, 3000) + shift for shift in (0.0, 0.1, 0.2)] + [torch.full((3000,), 1e20)]

    def body(group: Group) -> torch.Tensor:
        coder = Coder(Method.of(words), combine=Median().combine)
        reducer = Reducer(coder)
        reducer.add(0, torch.float32, 3000, [Piece("p", slice(0, 3000), 1)])
        arena = group.arena(12000, None, reducer.through, apart=True)
        flat = arena.memory.view(torch.float32)
        coder.begin({})
        flat.copy_(values[group.rank])
        arena.post(flat)
        arena.wait()
        return flat.clone()

    results = together(4, body, hosts=hosts)
    for result in results:
        assert torch.equal(result, results[0])
    torch.testing.assert_close(results[0], torch.linspace(-1, 1, 3000) + 0.15, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("meen", "did you mean 'mean'"),
        ("loss(0)", "more than 0"),
        ("loss(temperature=nan)", "more than 0|plain numbers"),
        ("trimmed(0)", "at least 1"),
        ("trimmed(1.5)", "at least 1"),
        (3, "give words such as"),
        (Median, "give words such as"),
    ],
)
def test_averages_that_mean_nothing_are_refused(words: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_average(words)
    with pytest.raises(ConfigError, match="start at least"):
        Trimmed(2).check(4)
    with pytest.raises(ConfigError, match="start at least 3"):
        Median().check(2)
