"""What each second was like, from the counts of replicas."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.serve.counts import LATENCY_S, Counts
from paceline.serve.record import KEPT, Record, quantile


def counted(*seconds: float, status: int = 200) -> Counts:
    counts = Counts()
    for each in seconds:
        counts.answered(status, each)
    return counts


def test_a_second_is_the_difference_to_the_one_before() -> None:
    record = Record()
    record.add(100.0, counted(0.003, 0.003))
    later = counted(0.003, 0.003, 0.03, 0.03, 0.03)
    later.answered(429, 0.0)
    later.queue, later.version = 4, 9
    record.add(102.0, later, 0.75)
    told = {name: column[0] for name, column in record.columns().items()}
    assert told["answered"] == 1.5
    assert told["refused"] == 0.5
    assert told["p50_ms"] is not None
    assert 20 < told["p50_ms"] <= 50  # the two quick ones of before do not count
    assert (told["queue"], told["version"], told["metric"], told["at"]) == (4, 9, 0.75, 102.0)


def test_a_second_without_requests_has_no_latency() -> None:
    record = Record()
    for at in (1.0, 2.0):
        record.add(at, counted(0.003))
    assert record.columns()["p99_ms"] == [None]
    assert record.columns()["answered"] == [0.0]
    assert record.columns()["version"] == [None]


def test_only_the_last_ten_minutes_are_kept() -> None:
    record = Record()
    for at in range(2 * KEPT):
        record.add(float(at), Counts(queue=at))
    queue = record.columns()["queue"]
    assert len(queue) == KEPT
    assert (queue[0], queue[-1]) == (KEPT, 2 * KEPT - 1)


def test_a_clock_that_is_set_back_makes_no_rate() -> None:
    record = Record()
    record.add(100.0, counted())
    record.add(50.0, counted(0.1))
    record.add(51.0, counted(0.1, 0.1))
    assert record.columns()["answered"] == [1.0]


def test_totals_that_fall_count_as_nothing() -> None:
    record = Record()
    record.add(1.0, counted(0.1, 0.1))
    record.add(2.0, counted(0.1))
    assert record.columns()["answered"] == [0.0]
    assert record.columns()["p50_ms"] == [None]


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_a_quantile_lies_in_the_right_bucket(q: float) -> None:
    values = np.random.default_rng(0).exponential(0.02, 5000)
    told = quantile(counted(*values).latency, q)
    assert told is not None
    true = float(np.quantile(values, q))
    above = next(bound for bound in LATENCY_S if bound >= true)
    below = max([0.0, *(bound for bound in LATENCY_S if bound < true)])
    assert below <= told <= above
    assert told == pytest.approx(true, rel=0.35)


def test_what_is_slower_than_the_last_bound_is_told_as_that_bound() -> None:
    assert quantile(counted(1e3).latency, 0.99) == LATENCY_S[-1]
