"""The report: parsed as a browser would, from event files as runs leave them."""

from __future__ import annotations

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.events import Events, JsonLines
from paceline.train.history import read
from paceline.train.report import write_report
from paceline.train.thin import MOST, bins, thin

_VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Elements with their attributes and text; fails on a tag that is not closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1][0] if self.open else "", data))

    def of(self, tag: str) -> list[str]:
        return [text for inside, text in self.texts if inside == tag]

    def points(self) -> Any:
        return json.loads(next(t for t in self.of("script") if t.lstrip().startswith("{")))

    def curve(self, title: str) -> dict[str, Any]:
        charts = self.points()["charts"].values()
        found: dict[str, Any] = next(c for c in charts if c["series"][0]["name"] == title)
        return found

    def paths(self, title: str, kind: str) -> list[str]:
        """The drawings of class `kind` in the figure with this title."""
        figure = next(f for f in self.source.split("<figure")[1:] if f"<h3>{title}</h3>" in f)
        return re.findall(rf'<path class="{kind}" d="([^"]*)"', figure.split("</figure>")[0])


class Writer:
    """Writes the events of one member through the real sink, on a clock that the test holds."""

    def __init__(self, run_dir: Path, rank: int = 0, at: float = 1_000_000.0) -> None:
        self.file = JsonLines(run_dir / "events" / f"rank-{rank}.jsonl")
        self.rank, self.now = rank, at

    def emit(self, kind: str, **fields: Any) -> None:
        self.file({"kind": kind, "time": self.now, "rank": self.rank, **fields})

    def steps(self, first: int, last: int, loss: float | None = None, **more: Any) -> None:
        for step in range(first, last + 1):
            self.now += 1.0
            times = {"data_s": 0.1, "compute_s": 0.6, "wait_s": 0.3}
            scalars = {"loss": 1 / step if loss is None else loss} | more
            self.emit("step", epoch=0, step=step, samples=32, scalars=scalars, **times)


def whole_run(run_dir: Path, name: str = "digits", scalar: str = "grad norm", message: str = "odd") -> None:
    for rank in range(2):
        writer = Writer(run_dir, rank)
        start = {"size": 2, "strategy": "allreduce", "script": "train.py", "device": "cpu", "resumed_step": 0}
        writer.emit("start", name=name, **start)
        for epoch in range(3):
            writer.emit("epoch", epoch=epoch, epochs=3, steps=10, step=epoch * 10)
            writer.steps(epoch * 10 + 1, epoch * 10 + 10, **{scalar: float(epoch)})
            writer.emit("metric", name=f"{scalar} metric", value=0.9, step=epoch * 10 + 10, epoch=epoch)
        writer.emit("checkpoint", step=30, path=f"{message}/30", seconds=0.5, bytes=1_500_000)
        writer.emit("warning", message=message)
        share = {"samples": 480, "seconds": 30, "data_s": 3, "compute_s": 18, "wait_s": 9, "sent_bytes": 1000}
        members = [{"rank": r, "host": f"{name}{r}"} | share for r in range(2)]
        writer.emit("end", outcome="finished", step=30, seconds=31, members=members)
        writer.file.close()


def test_who_was_slow_and_what_was_done_is_on_the_page(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    slow = {"member": 1, "times": 2.2, "reason": "load", "text": "takes <2.2> times as long"}
    writer.emit("straggler", **slow, done="gets less", step=20)
    writer.emit("shares", members=[0, 1], samples=[11, 5], step=1050)
    writer.emit("shares", members=3, samples="?", step=1051)
    writer.file.close()
    page = Page(write_report(tmp_path))
    assert "Stragglers" in page.of("h2")
    cells = page.of("td")
    assert "20, 1, takes <2.2> times as long, gets less" in ", ".join(cells)
    assert "11 samples for 0, 5 samples for 1" in cells
    assert "1,050" in cells


def test_everything_is_on_the_page(tmp_path: Path) -> None:
    whole_run(tmp_path)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = Page(path)
    assert page.of("h1") == page.of("title") == ["digits"]
    assert "finished" in page.of("span")
    facts = page.of("p")[0]
    assert facts == "allreduce · 2 members on 2 hosts · cpu · train.py · 1970-01-12 13:46 UTC"
    assert page.of("h3") == ["loss", "grad norm metric", "grad norm", "samples/s", "member 0", "member 1"]
    tiles = dict(zip(page.of("dt"), page.of("dd")))
    assert tiles["duration"] == "0:30"
    assert (tiles["steps"], tiles["samples/s"], tiles["waiting"]) == ("30", "32", "30%")
    assert (tiles["last loss"], tiles["grad norm metric"]) == ("0.03333", "0.9000")
    heads = ["Curves", "Samples per second over training time", "Where the time went", "Members"]
    assert page.of("h2") == [*heads, "Checkpoints", "Warnings"]
    cells = page.of("td")
    assert "digits0" in cells
    assert "odd/30" in cells
    assert "1.5 MB" in cells
    assert page.of("li") == ["member 0: odd", "member 1: odd"]


def test_every_curve_is_drawn_and_can_be_read(tmp_path: Path) -> None:
    whole_run(tmp_path)
    page = Page(write_report(tmp_path))
    loss = page.curve("loss")
    assert loss["x"] == list(range(1, 31))
    assert loss["series"][0]["y"][:2] == [1.0, 0.5]
    linear, log = page.paths("loss", "line")  # 1 to 1/30: worth a log scale
    assert linear.count("L") == log.count("L") == 29
    assert page.paths("loss", "epoch")[0].count("M") == 3
    assert page.curve("samples/s")["series"][0]["y"] == [32.0] * 30
    assert [s["y"][0] for s in page.curve("data")["series"]] == [0.1, 0.6, 0.3]
    assert page.paths("member 1", "compute")
    assert page.points()["epochs"] == [[0, 1], [10, 2], [20, 3]]


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    whole_run(tmp_path)
    page = Page(write_report(tmp_path))
    assert "http://" not in page.source
    assert "https://" not in page.source
    assert "@import" not in page.source
    assert "url(" not in page.source
    loading = {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}
    assert not [(tag, a) for tag, a in page.tags if loading & set(a)]
    assert not {"link", "img", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in page.source
    assert any(a.get("name") == "viewport" for _, a in page.tags)


def test_whatever_the_run_says_is_harmless(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>\"'&"
    whole_run(tmp_path, name=evil, scalar=evil, message=f"{evil}<img src=x onerror=alert(1)>")
    page = Page(write_report(tmp_path))
    kinds = [tag for tag, _ in page.tags]
    assert kinds.count("script") == 2
    assert "img" not in kinds
    assert not [a for _, a in page.tags for name in a if name.startswith("on")]
    assert page.of("h1") == [evil]
    assert page.of("h3")[2].startswith("</script><script>")
    assert page.curve(page.of("h3")[2])["x"] == list(range(1, 31))  # the data is whole, too
    assert "alert(1)</script>" not in page.source


def test_a_torn_line_is_left_out_and_what_follows_it_is_not(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.emit("start", name="torn", resumed_step=0)
    writer.steps(1, 5)
    with writer.file.path.open("a") as file:
        file.write('{"kind": "step", "time": 1000006.0, "rank": 0, "epoch": 0, "st')
    history = read(tmp_path)
    assert (history.step, history.unread) == (5, 1)
    writer = Writer(tmp_path, at=2_000_000.0)  # appends to the torn line
    writer.emit("start", name="torn", resumed_step=3)
    writer.steps(4, 8)
    history = read(tmp_path)
    assert len(history.starts) == 2
    assert history.scalars["loss"].steps.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("junk", [b"\xff\xfe{\n", b"[1, 2]\n", b"null\n", b"\n", b'{"kind": 7}\n', b"\x00" * 4096])
def test_junk_in_a_file_is_left_out(tmp_path: Path, junk: bytes) -> None:
    writer = Writer(tmp_path)
    writer.emit("start", name="junk", resumed_step=0)
    with writer.file.path.open("ab") as file:
        file.write(junk + b"\n")
    writer.steps(1, 3)
    assert Page(write_report(tmp_path)).curve("loss")["x"] == [1, 2, 3]


def test_a_resumed_run_is_one_line_and_the_latest_counts(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.emit("start", name="twice", resumed_step=0)
    writer.emit("epoch", epoch=0, epochs=2, step=0)
    writer.steps(1, 10, loss=1.0, only_before=1.0)
    writer.emit("metric", name="acc", value=0.1, step=6)
    writer.emit("metric", name="acc", value=0.2, step=10)
    writer.emit("epoch", epoch=1, epochs=2, step=10)
    writer.emit("checkpoint", step=6, path="six")
    writer.emit("checkpoint", step=10, path="lost")
    writer.file.close()
    again = Writer(tmp_path, at=5_000_000.0)
    again.emit("start", name="twice", resumed_step=6)
    again.emit("epoch", epoch=0, epochs=2, step=0)
    again.now += 2.0
    again.emit("step", epoch=0, step=9, samples=96, scalars={"loss": 2.0}, compute_s=3.0)  # three steps in one
    again.steps(10, 12, loss=2.0)
    again.emit("metric", name="acc", value=0.3, step=12)
    again.emit("end", outcome="finished", step=12, seconds=5)
    again.file.close()
    page = Page(write_report(tmp_path))
    loss = page.curve("loss")
    assert loss["x"] == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12]  # 7 and 8 of the part that was lost are gone
    assert loss["series"][0]["y"] == [1.0] * 6 + [2.0] * 4
    assert page.curve("acc")["x"] == [6, 12]
    assert page.curve("only_before")["x"] == [1, 2, 3, 4, 5, 6]
    assert page.points()["epochs"] == [[0, 1]]
    assert page.paths("loss", "resume")[0].count("M") == 1
    assert "resumed at step 6" in page.of("p")[0]
    assert "six" in page.of("td")
    assert "lost" not in page.of("td")
    assert dict(zip(page.of("dt"), page.of("dd")))["duration"] == "0:15"  # 10 s and 5 s, not the weeks between
    assert math.isclose(read(tmp_path).elapsed_s, 15.0)


def test_a_run_that_began_anew_shows_only_its_new_self(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        writer = Writer(tmp_path)
        writer.emit("start", name="fresh", resumed_step=0)
        writer.steps(1, 4, loss=loss)
    page = Page(write_report(tmp_path))
    assert page.curve("loss")["series"][0]["y"] == [2.0] * 4
    assert not page.paths("loss", "resume")


def test_a_run_that_was_killed_has_a_report(tmp_path: Path) -> None:
    for rank in range(2):
        writer = Writer(tmp_path, rank)
        writer.emit("start", name="killed", size=2, resumed_step=0)
        writer.steps(1, 4)
    page = Page(write_report(tmp_path))
    assert "unfinished" in page.of("span")
    tiles = dict(zip(page.of("dt"), page.of("dd")))
    assert (tiles["steps"], tiles["samples/s"], tiles["waiting"]) == ("4", "32", "30%")


def test_what_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for step, loss in enumerate((3.0, 2.0, math.nan, 1.0, math.inf, -math.inf, 0.5, 0.25), start=1):
        writer.steps(step, step, loss=loss)
    page = Page(write_report(tmp_path))
    assert page.curve("loss")["series"][0]["y"] == [3.0, 2.0, None, 1.0, None, None, 0.5, 0.25]
    line = page.paths("loss", "line")[0]
    assert (line.count("M"), line.count("L")) == (2, 2)  # 3 to 2, and 0.5 to 0.25; the 1 stands alone
    assert page.paths("loss", "dots")[0].count("M") == 5
    assert "nan" not in line
    assert page.paths("loss", "lost")[0].count("M") == 3
    assert "3 of 8 not finite, first at step 3" in page.of("p")


@pytest.mark.parametrize(
    "values",
    [
        [math.nan, math.nan],
        [0.0, 0.0, 0.0],
        [5.0],
        [-1.0, -1000.0],
        [1e308, -1e308, 1.7e308],
        [1e-320, 1e-310],
        [True, None, "word"],
        [10**30, 2 * 10**30],
    ],
)
def test_odd_values_are_drawn_or_left_out(tmp_path: Path, values: list[Any]) -> None:
    writer = Writer(tmp_path)
    for step, value in enumerate(values, start=1):
        writer.steps(step, step, loss=value)
    page = Page(write_report(tmp_path))
    assert page.curve("loss")["x"] == list(range(1, len(values) + 1))
    for line in page.paths("loss", "line") + page.paths("loss", "dots"):
        assert "nan" not in line
        assert "inf" not in line


def test_no_events_at_all(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert page.of("h1") == [tmp_path.name]
    assert "unfinished" in page.of("span")
    assert not page.of("h3")


def test_a_spike_in_a_long_curve_is_kept() -> None:
    y = np.ones(100_000)
    y[54_321] = 50.0
    y[70_000:71_000] = np.nan
    drawn = thin(np.arange(100_000.0), y)
    assert len(drawn.x) <= MOST
    assert drawn.high is not None
    assert np.nanmax(drawn.high) == 50.0
    assert np.isnan(drawn.y).any()
    assert len(drawn.lost) == 1000


def test_bins_keep_every_second_and_sample() -> None:
    random = np.random.default_rng(0)
    seconds = random.exponential(size=5000)
    amounts = random.random((5000, 3))
    _, sums = bins(seconds, amounts, 200)
    assert sums.sum(axis=0) == pytest.approx(amounts.sum(axis=0))
    assert len(sums) <= 200


def test_many_members_are_all_in_the_table(tmp_path: Path) -> None:
    members = []
    for rank in range(20):
        writer = Writer(tmp_path, rank)
        writer.steps(1, 3)
        members.append({"rank": rank, "compute_s": 1.0 + rank, "wait_s": 20.0 - rank})
        if rank == 0:
            first = writer
    first.emit("end", outcome="finished", step=3, seconds=3, members=members)
    page = Page(write_report(tmp_path))
    drawn = [title for title in page.of("h3") if title.startswith("member")]
    assert drawn == [f"member {rank}" for rank in range(4, 20)]  # those that the others wait for
    assert "19, slowest" in page.of("td")
    assert "0" in page.of("td")


def test_half_a_million_events_take_seconds(tmp_path: Path) -> None:
    line = (
        '{{"kind": "step", "time": {0}.5, "rank": {1}, "epoch": 0, "step": {0}, "samples": 256, "scalars": '
        '{{"loss": 0.{0}, "lr": 0.1}}, "data_s": 0.01, "compute_s": 0.07, "wait_s": 0.02, "sent_bytes": 4000}}\n'
    )
    (tmp_path / "events").mkdir()
    for rank in range(2):
        text = "".join(line.format(step, rank) for step in range(1, 250_001))
        (tmp_path / "events" / f"rank-{rank}.jsonl").write_text(text)
    began = time.process_time()  # other tests may have the other cores
    path = write_report(tmp_path)
    assert time.process_time() - began < 6  # about one and a half
    assert path.stat().st_size < 2_000_000


def test_events_of_the_real_sink(tmp_path: Path) -> None:
    events = Events(0, [JsonLines(tmp_path / "events" / "rank-0.jsonl")])
    events.emit("start", name="real", size=1)
    events.emit("step", epoch=0, step=1, samples=1, scalars={"loss": math.inf}, compute_s=1.0)
    assert Page(write_report(tmp_path)).curve("loss")["series"][0]["y"] == [None]
