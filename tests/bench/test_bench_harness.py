"""The benchmarks' own parts: figures, turns, teams of workers, the plot."""

from __future__ import annotations

import json
import os
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench.harness import Figure, Report, compare, interleave, overhead
from bench.plot import Curve, draw
from bench.team import Team, TeamError

WORKER = """
import os, sys, time
from bench.team import serve

def hang():
    time.sleep(60)

def leave():
    print("last words", flush=True)
    os._exit(3)

def fail():
    raise ValueError("wrong on purpose")

serve({"add": lambda a, b: a + b + int(os.environ["BENCH_RANK"]), "hang": hang, "leave": leave, "fail": fail})
"""


def team(size: int = 2) -> Team:
    command = [sys.executable, "-c", WORKER]
    return Team(size, [(command, {"BENCH_RANK": str(rank)}) for rank in range(size)], limit_s=20)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_team_answers_in_the_order_of_ranks_and_leaves_nothing() -> None:
    with team(3) as workers:
        assert workers.call("add", a=1, b=10) == [11, 12, 13]
        assert workers.slowest("add", a=1, b=10) == 13
        folder, pids = workers.folder, workers.pids
    assert not any(map(alive, pids))
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "message"), [("hang", "in time"), ("leave", "last words"), ("fail", "wrong on purpose")]
)
def test_a_worker_that_fails_is_told_of_and_all_are_ended(name: str, message: str) -> None:
    began = time.monotonic()
    workers = team()
    with pytest.raises(TeamError, match=message), workers:
        workers.call(name, limit_s=1)
    assert len(workers.pids) == 2
    assert not any(map(alive, workers.pids))
    assert time.monotonic() - began < 20


def test_a_worker_that_never_starts_is_told_of() -> None:
    with (
        pytest.raises(TeamError, match="never arrived"),
        Team(1, [([sys.executable, "-c", "1/0"], {})], limit_s=5),
    ):
        pass


def test_sides_take_turns_and_change_who_goes_first() -> None:
    turns: list[str] = []

    def side(name: str, seconds: float):  # type: ignore[no-untyped-def]
        def block(iterations: int) -> float:
            turns.append(name)
            return seconds * iterations

        return block

    times = interleave({"a": side("a", 0.1), "b": side("b", 0.2)}, repeats=3, block_s=1.0, limit_s=60)
    assert turns[4:] == ["a", "b", "b", "a", "a", "b"]
    assert times["a"] == pytest.approx([0.1] * 3)
    assert times["b"] == pytest.approx([0.2] * 3)


def test_the_figure_is_the_median_of_neighbours() -> None:
    """One block that a busy machine spoiled does not move it."""
    figure = compare("speedup", [1.0, 1.0, 9.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0, 3.0], goal=">= 3")
    assert figure.value == 3.0
    assert figure.holds
    cost = compare("overhead", [1.03], [1.0], goal="<= 2", ratio=overhead)
    assert cost.value == pytest.approx(3.0)
    assert cost.holds is False


def test_the_report_prints_a_table_and_writes_flat_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("bench.test")
    report.add(Figure(name="speedup", value=2.5, ours="2 ms", peer="5 ms", spread="2.4 .. 2.6", goal=">= 3"))
    report.finish(str(tmp_path / "figures.json"))
    assert json.loads((tmp_path / "figures.json").read_text()) == {"speedup": 2.5}
    printed = capsys.readouterr().out
    for word in ("figure", "ours", "peer", "ratio", "goal", "holds", "speedup", "2.5", ">= 3", "NO"):
        assert word in printed


def test_the_plot_is_well_formed(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    draw(
        str(file),
        [Curve(label="a < b", points=[(1, 1.0), (16, 12.5)])],
        title="t",
        x="members",
        y="y",
        ideal=True,
    )
    assert ET.parse(file).getroot().tag.endswith("svg")
    assert os.path.getsize(file) > 500
