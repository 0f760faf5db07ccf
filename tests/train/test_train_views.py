"""Members that came and went, in the summary and the report, against figures worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.events import JsonLines
from paceline.train.history import read
from paceline.train.report import write_report
from paceline.train.shown import text
from paceline.train.summary import summarise


def events(run_dir: Path, rank: int, *told: dict[str, Any]) -> None:
    lines = JsonLines(run_dir / "events" / f"rank-{rank}.jsonl")
    for event in told:
        lines({"rank": rank, **event})
    lines.close()


def start(at: float) -> dict[str, Any]:
    return {"kind": "start", "time": at, "size": 3, "name": "x", "resumed_step": None}


def view(number: int, at: float, **fields: Any) -> dict[str, Any]:
    known = {"size": 3, "lost": [], "joined": [], "healed": [], "seconds": 0.25, "reason": "", "step": 10 * number}
    return {"kind": "view", "time": at, "number": number} | known | fields


def end(at: float) -> dict[str, Any]:
    members = [{"rank": 0, "samples": 10, "seconds": 3.0, "compute_s": 3.0}]
    return {"kind": "end", "time": at, "outcome": "finished", "step": 60, "seconds": 9.0, "members": members}


TOLD = (
    start(50.0),
    view(7, 55.0, lost=[1]),  # of an earlier start
    start(100.0),
    view(2, 103.0, lost=[1], size=2, seconds=0.5, reason="member 1 was <killed>"),
    view(3, 104.0, joined=[1], healed=[1], seconds=4.0),
    view(4, 105.0, lost=[0, 2], joined=[3], size=2, seconds=0.75),
    view(5, 106.0, seconds=0.1, reason="a line broke"),
)
SHORT = (view(6, 107.0, lost=[3], size=1, seconds=0.5), view(7, 114.0, joined=[3], seconds=7.06, short=True))


def test_what_they_add_up_to(tmp_path: Path) -> None:
    events(tmp_path, 0, *TOLD, end(109.0))
    events(tmp_path, 1, start(100.0), view(2, 103.0, lost=[9]))  # told by the first member alone
    views = read(tmp_path).views
    assert views is not None
    assert (views.changes, views.lost, views.replaced, views.joined) == (4, 3, 1, 1)
    assert round(views.recovery_s, 6) == 1.35  # the join that nobody had to recover from does not count
    assert [v.number for v in views.last] == [2, 3, 4, 5]
    assert views.last[2].cells == ("4", "0:05", "40", "2", "0, 2", "3", "-", "0.75 s")

    shown = text(summarise(end(109.0), start(100.0), views))
    assert "members came and went: 3 lost, 1 replaced, 1 joined, in 4 views; 1.35 s in recovery" in shown
    assert any(line.split()[:4] == ["2", "0:03", "20", "2"] for line in shown.splitlines())

    page = write_report(tmp_path).read_text()
    assert "Members that came and went" in page
    assert "member 1 was &lt;killed&gt;" in page


def test_a_standstill_for_lack_of_members_is_told_apart(tmp_path: Path) -> None:
    events(tmp_path, 0, start(100.0), *SHORT, end(120.0))
    views = read(tmp_path).views
    assert views is not None
    assert views.line.endswith("; 0.50 s in recovery, 7.1 s waiting for members")


def test_who_left_and_came_back_has_joined_unless_it_was_lost_after_all(tmp_path: Path) -> None:
    """1: sys.exit(3), which looks like leaving at first; 2: `paceline scale` down and up; then 2 is killed."""
    told = (
        view(2, 103.0, lost=[1], left=[1], size=2),
        view(3, 104.0, joined=[1], instead=[1]),
        view(4, 105.0, lost=[2], left=[2], size=2),
        view(5, 106.0, joined=[2]),
        view(6, 107.0, lost=[2], size=2),
        view(7, 108.0, joined=[2], instead=[2]),
    )
    events(tmp_path, 0, start(100.0), *told, end(109.0))
    views = read(tmp_path).views
    assert views is not None
    assert (views.lost, views.left, views.replaced, views.joined) == (2, 1, 2, 1)
    assert [v.cells[4] for v in views.last] == ["1", "-", "2 left", "-", "2", "-"]


def test_who_left_first_and_was_lost_later_is_told_as_both(tmp_path: Path) -> None:
    told = (
        view(2, 103.0, lost=[1], left=[1], size=2),  # `paceline scale` down and up
        view(3, 104.0, joined=[1]),
        view(4, 105.0, lost=[1], left=[1], size=2),  # sys.exit(3)
        view(5, 106.0, joined=[1], instead=[1]),
    )
    events(tmp_path, 0, start(100.0), *told, end(109.0))
    views = read(tmp_path).views
    assert views is not None
    assert (views.lost, views.left, views.replaced, views.joined) == (1, 1, 1, 1)
    assert [v.cells[4] for v in views.last] == ["1 left", "-", "1", "-"]


def test_many_are_counted_and_few_are_kept(tmp_path: Path) -> None:
    events(tmp_path, 0, start(0.0), *(view(n, float(n), lost=[n % 4], joined=[(n + 2) % 4]) for n in range(1, 201)))
    views = read(tmp_path).views
    assert views is not None
    assert (views.changes, views.lost, len(views.last)) == (200, 200, 50)
    assert "and 150 before them" in write_report(tmp_path).read_text()


def test_what_is_no_view_is_passed_over(tmp_path: Path) -> None:
    events(tmp_path, 0, {"kind": "view", "time": "then", "number": "two", "lost": 3, "seconds": None})
    views = read(tmp_path).views
    assert views is not None
    assert (views.changes, views.lost, views.recovery_s) == (1, 0, 0.0)
    assert read(tmp_path / "none").views is None
