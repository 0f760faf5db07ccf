"""The summary of a run, against figures worked out by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.train.shown import print_summary, table, text
from paceline.train.summary import Apart, Summary, summarise, write_summary
from paceline.train.views import Views


def member(rank: int, data: float, compute: float, wait: float, **fields: Any) -> dict[str, Any]:
    seconds = data + compute + wait
    given = {"rank": rank, "data_s": data, "compute_s": compute, "wait_s": wait, "seconds": seconds}
    return given | {"samples": 1000, "sent_bytes": 2_000_000, "host": "a"} | fields


def end(*members: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"kind": "end", "outcome": "finished", "step": 50, "seconds": 12.0, "members": list(members)} | fields


START = {"kind": "start", "name": "digits", "strategy": "allreduce", "size": 3, "resumed_step": 20}


def test_figures_of_three_members() -> None:
    # Each took 10 s. Members 0 and 2 waited for member 1, which waited for nobody.
    s = summarise(end(member(2, 1, 3, 6), member(0, 0, 5, 5), member(1, 1, 9, 0, samples=500, host="b")), START)
    assert (s.name, s.strategy, s.size, s.outcome, s.step, s.resumed_step) == (
        "digits",
        "allreduce",
        3,
        "finished",
        50,
        20,
    )
    assert s.seconds == 12
    assert s.samples == 2500
    assert s.samples_per_s == 250  # over the 10 s of training, not the 12 s of the whole run
    assert s.sent_bytes == 6_000_000
    assert (s.data_share, s.compute_share, s.wait_share) == pytest.approx((2 / 30, 17 / 30, 11 / 30))
    assert [m.rank for m in s.members] == [0, 1, 2]
    assert [m.samples_per_s for m in s.members] == [100, 50, 100]
    assert [m.wait_share for m in s.members] == [0.5, 0, 0.6]
    assert [m.busy_s for m in s.members] == [5, 10, 4]
    assert s.slowest == 1
    assert s.slowest_by == pytest.approx(10 / 4.5)
    assert s.members[1].host == "b"


def test_the_slowest_is_who_works_longest_not_who_waits_longest() -> None:
    s = summarise(end(member(0, 0, 2, 8), member(1, 0, 10, 0)))
    assert s.slowest == 1


def test_who_came_late_or_went_is_compared_by_sample_and_shown_with_the_time_it_was_there() -> None:
    """Member 2 came in the middle; member 1 left, after it had trained more slowly than those who are here."""
    went = member(1, 0, 30, 0, samples=100, left=True)
    s = summarise(end(member(0, 0, 80, 20), member(2, 0, 9, 1, samples=100), went, trained_s=120), None, Views())
    assert (s.slowest, s.samples, s.trained_s) == (2, 1200, 120)
    assert s.slowest_by == pytest.approx(0.09 / 0.08)
    assert s.samples_per_s == 10  # over the time of all of them
    head, *rows = [line.split() for line in text(s).splitlines()[2:] if not line.startswith("─") and line]
    assert head[:3] == ["member", "there", "samples"]
    assert [row[:3] for row in rows[:3]] == [["0", "1:40", "1,000"], ["1", "0:30", "100"], ["2", "0:10", "100"]]
    assert rows[1][-1] == "left"
    assert rows[3][:3] == ["all", "2:00", "1,200"]
    assert "there" not in text(summarise(end(member(0, 0, 80, 20), member(1, 0, 80, 20))))


def test_even_members_have_no_slowest() -> None:
    assert summarise(end(member(0, 0, 10, 1), member(1, 0, 10.1, 1))).slowest is None
    assert summarise(end(member(0, 0, 10, 1))).slowest is None


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([member(0, 0, 5, 5), member(1, 0, 9, 1)], ""),  # 30% exactly
        (
            [member(0, 0, 4, 6), member(1, 0, 9, 1)],
            "members wait 35% of the time for member 1, which is busy 2.2x as long as the others: does only that one",
        ),
        (
            [member(0, 0, 4, 6), member(1, 0, 9, 1, host="b")],
            "which is busy 2.2x as long as the others: give it a faster or less loaded host",
        ),
        (  # its neighbour on the same host is quick, so the host is not to blame
            [member(0, 0, 4, 6), member(1, 0, 4, 6, host="b"), member(2, 0, 9, 1, host="b")],
            "for member 2, which is busy 2.2x as long as the others: does only that one",
        ),
        (  # its neighbour is as slow
            [member(0, 0, 4, 6), member(1, 0, 4, 6), member(2, 0, 9, 1, host="b"), member(3, 0, 8.5, 1.5, host="b")],
            "for member 2, which is busy 1.6x as long as the others: give it a faster or less loaded host",
        ),
        ([member(0, 0, 2, 8), member(1, 8, 2, 0)], "for member 1, whose data comes late"),
        ([member(0, 0, 5, 5), member(1, 0, 5, 5)], "wait 50% of the time, for the exchange and not for one of them"),
        ([member(0, 0, 5, 5), member(1, 0, 6, 4, host="b")], "for the exchange and not for one of them"),  # 1.2x
        ([member(0, 3, 7, 0), member(1, 3, 7, 0)], "30% of the time goes into waiting for data: raise workers"),
        ([member(0, 2, 8, 0)], ""),  # 20% exactly
        ([member(0, 0, 4, 6)], ""),  # nobody else to wait for
    ],
)
def test_advice(members: list[dict[str, Any]], said: str) -> None:
    advice = summarise(end(*members)).advice
    assert said in advice
    assert bool(said) == bool(advice)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (  # not the host's fault, although there are two
            [member(0, 0, 4, 6), member(1, 0, 9, 1, host="b")],
            "members wait 35% of the time: steps of 4 ms leave little to compute between two exchanges; larger "
            "batches or fewer members would pay",
        ),
        ([member(0, 3, 7, 0)], "30% of the time goes into fetching data for steps of 4 ms: larger batches"),
        ([member(0, 1, 9, 0), member(1, 1, 9, 0)], ""),
    ],
)
def test_advice_on_short_steps(members: list[dict[str, Any]], said: str) -> None:
    advice = summarise(end(*members, step=2520), START).advice  # 2500 of them now, 20 before
    assert said in advice
    assert bool(said) == bool(advice)
    assert "ms" not in summarise(end(*members, step=1020), START | {"resumed_step": 20}).advice  # 10 ms each


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"members": []},
        {"members": None, "outcome": None},
        {"members": [{"rank": 0}, {"rank": 1}]},
        {"members": [{"rank": 0, "pushes": "many", "drop_reasons": 3}]},
        {"members": [{"rank": 0, "samples": "nan", "data_s": None, "compute_s": "inf", "seconds": -1}]},
    ],
)
def test_what_is_missing_counts_as_nothing(event: dict[str, Any]) -> None:
    s = summarise(event)
    assert (s.samples, s.samples_per_s, s.wait_share, s.advice) == (0, 0, 0, "")
    assert text(s).startswith("ended  0 steps")


def test_pushes_of_all_workers_are_told_together() -> None:
    old, closed = "it is n versions old", "its round was closed without it"
    a = {"pushes": 600, "pushed_bytes": 600_000, "dropped_pushes": 3, "drop_reasons": {old: 2, closed: 1}}
    b = {"pushes": 400, "pushed_bytes": 1_400_000, "dropped_pushes": 4, "drop_reasons": {old: 4}}
    s = summarise(end(member(0, 0, 9, 1, **a, ages=1500, oldest=9), member(1, 0, 9, 1, **b, ages=500, oldest=11)))
    assert s.pushed is not None
    assert (s.pushed.pushes, s.pushed.dropped, s.pushed.mean_age, s.pushed.oldest) == (1000, 7, 2.0, 11)
    assert s.pushed.reasons == {old: 6, closed: 1}
    assert s.pushed.line in text(s)
    assert s.pushed.line == (
        "1,000 pushes of 2.0 kB, 2 versions old on average and 11 at most; 7 dropped (it is n versions old: 6; its "
        "round was closed without it: 1)"
    )


def test_pushes_of_sync_have_no_age_worth_telling() -> None:
    s = summarise(end(member(0, 0, 9, 1, pushes=50, pushed_bytes=50, ages=0, oldest=0)))
    assert s.pushed is not None
    assert s.pushed.line == "50 pushes of 1 B"
    assert summarise(end(member(0, 0, 9, 1))).pushed is None


def test_codes_on_pushes_have_no_times_but_their_encodings() -> None:
    coded = {"codec": "sign", "bytes_before": 3200, "bytes_after": 100, "encode_s": 0.5, "residual_norm": 2.0}
    s = summarise(end(member(0, 0, 9, 1, **coded)))
    assert s.coded is not None
    assert "(32x less); encode 0.5 s; unsaid 2" in s.coded.line
    s = summarise(end(member(0, 0, 9, 1, **{**coded, "bytes_after": 4000})))
    assert s.coded is not None
    assert "(1.25x more)" in s.coded.line


def test_the_table_as_text() -> None:
    s = summarise(end(member(0, 0, 4, 6), member(1, 0, 9, 1, host="[b]")), START)
    lines = text(s).splitlines()
    assert lines[0] == "finished  50 steps  0:12  200 samples/s  4.0 MB sent"
    rows = [line.split() for line in lines if line.strip()]
    assert rows[1] == ["member", "host", "samples", "samples/s", "sent", "data", "compute", "wait"]
    assert rows[3] == ["0", "a", "1,000", "100", "2.0", "MB", "0%", "40%", "60%"]
    assert rows[4][:9] == ["1", "[b]", "1,000", "100", "2.0", "MB", "0%", "90%", "10%"]
    assert rows[4][9:] == ["slowest,", "2.25x", "the", "others"]
    assert rows[5] == ["all", "2,000", "200", "4.0", "MB", "0%", "65%", "35%"]
    assert lines[-1].startswith("advice: members wait 35%")
    widths = {line.index("MB") for line in lines[1:] if "MB" in line}
    assert len(widths) == 1  # numbers stand below each other
    assert not any(line != line.rstrip() for line in lines)


def test_printing_where_there_is_no_terminal() -> None:
    s = summarise(end(member(0, 0, 4, 6), member(1, 0, 9, 1)), START)
    stream = io.StringIO()
    print_summary(s, stream)
    assert stream.getvalue() == text(s)
    assert "\x1b" not in stream.getvalue()
    stream.close()
    print_summary(s, stream)  # nobody is there to read
    assert table(s) is not None


def test_summary_json_reads_back(tmp_path: Path) -> None:
    s = summarise(end(member(0, 0, 4, 6), member(1, 0, 9, 1)), START)
    path = write_summary(s, tmp_path)
    assert path == tmp_path / "summary.json"
    assert msgspec.json.decode(path.read_bytes(), type=Summary) == s
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_members_that_train_apart_are_told_what_makes_rounds_rarer() -> None:
    members = [
        {
            "rank": r,
            "samples": 600,
            "seconds": 10,
            "compute_s": 4,
            "wait_s": 6,
            "rounds": 12,
            "every": 50,
            "drift": 0.02,
        }
        for r in range(2)
    ]
    summary = summarise({"outcome": "finished", "step": 600, "members": members})
    assert summary.apart is not None
    assert summary.apart.line == "12 rounds, now of 50 steps; members came 0.02 apart"
    assert "every=" in summary.advice
    assert "12 rounds" in text(summary)
    assert Apart(rounds=1, every=1000).line == "1 round, now of 1,000 steps"  # cut short: it tells nothing of drift
