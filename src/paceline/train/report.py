"""The report of a run: one HTML file that needs nothing else, with curves, members, and where time went.

Written at the end of a run, and at any other time from the event files alone. Everything that comes from
the run (its name, names of scalars, messages, paths) is escaped; the page allows no script but its own, and
loads nothing. Drawing is in chart.py, reading in history.py, tables in tables.py.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.core.events import Event
from paceline.train import figures, tables
from paceline.train.chart import Chart, Stack, draw, draw_stack, points, stack_points
from paceline.train.figures import clean
from paceline.train.history import Curve, History, read
from paceline.train.story import MEAN, SPLIT
from paceline.train.summary import Summary, summarise
from paceline.train.thin import Drawn, bins, thin

_MOST_STACKS = 16  # members whose time is drawn; the table has all
_TIME_BINS = 200


def write_report(run_dir: Path, history: History | None = None) -> Path:
    """Writes report.html into the directory of a run, from its events; `history` is what was read of them already."""
    history = history or read(run_dir)
    path = run_dir / "report.html"
    part = path.with_name(path.name + ".part")
    part.write_text(page(history, run_dir.resolve()), encoding="utf-8")
    os.replace(part, path)
    return path


def page(history: History, run_dir: Path) -> str:
    """The whole document."""
    start = history.starts[-1] if history.starts else {}
    summary = summarise(history.end or _end_so_far(history), start, history.views)
    title = html.escape(clean(start.get("name") or run_dir.name, 200))
    keyed: dict[str, Any] = {}
    sections = [
        _header(history, start, summary, title),
        _tiles(history, summary),
        f'<p class="advice">{html.escape(summary.lost_line)}</p>' if summary.lost else "",
        f'<p class="facts">{html.escape(summary.pushed.line)}</p>' if summary.pushed else "",
        f'<p class="facts">{html.escape(summary.apart.line)}</p>' if summary.apart else "",
        f'<p class="facts">{html.escape(summary.called.line)}</p>' if summary.called else "",
        f'<p class="facts">precision {html.escape(summary.cast.line)}</p>' if summary.cast else "",
        f'<p class="facts">codec {html.escape(summary.coded.line)}</p>' if summary.coded else "",
        f'<p class="advice">{html.escape(summary.advice)}</p>' if summary.advice else "",
        _section("Curves", _curves(history, keyed)),
        _section("Samples per second over training time", _speed(history, keyed)),
        _section("Where the time went", _stacks(history, summary, keyed)),
        _section("Members", tables.members(summary)),
        _section("Members that came and went", tables.views(summary.views)),
        _section("Stragglers", tables.stragglers(history)),
        _section("Checkpoints", tables.checkpoints(history.checkpoints, run_dir)),
        _section("Warnings", tables.warnings(history)),
    ]
    body = "\n".join(filter(None, sections))
    epochs = [(int(s), int(e) + 1) for s, e in zip(history.epochs.steps, history.epochs.values) if e == e]
    style, script = _asset("report.css"), _asset("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    data = msgspec.json.encode({"charts": keyed, "epochs": epochs}).decode()
    for character in "<>&\u2028\u2029":  # nothing in the data may end the element that holds it
        data = data.replace(character, f"\\u{ord(character):04x}")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
{_footer(history)}
</main>
<script type="application/json" id="points">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (files("paceline.train") / name).read_text(encoding="utf-8")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>\n{body}</section>" if body else ""


def _end_so_far(history: History) -> Event:
    """What the "end" event would say, of a run that has none: it was killed, or goes on."""
    members = []
    for rank, times in history.times.items():
        _, data, compute, wait = times.rows.sum(axis=0)
        members.append({"rank": rank, "data_s": data, "compute_s": compute, "wait_s": wait})
    return {"outcome": "unfinished", "step": history.step, "seconds": history.elapsed_s, "members": members}


def _header(history: History, start: Event, summary: Summary, title: str) -> str:
    known = ("finished", "failed", "stopped", "left early")
    outcome = summary.outcome if summary.outcome in known else "unfinished"
    hosts = len({m.host for m in summary.members if m.host})
    facts = [clean(start.get(key), 200) for key in ("strategy",) if start.get(key)]
    facts.append(figures.members(summary.size) + (f" on {hosts} hosts" if hosts > 1 else ""))
    facts += [clean(start.get(key), 200) for key in ("device", "script") if start.get(key)]
    if history.began:
        facts.append(datetime.fromtimestamp(history.began, UTC).strftime("%Y-%m-%d %H:%M UTC"))
    if resumed := history.resumed_steps:
        facts.append("resumed at step " + ", ".join(f"{s:,}" for s in resumed[-5:]))
    said = html.escape(" · ".join(facts))
    kind = outcome.replace(" ", "-")
    badge = f'<span class="badge {kind}">{outcome}</span>'
    return f'<header><h1>{title}</h1>{badge}<p class="facts">{said}</p></header>'


def _tiles(history: History, summary: Summary) -> str:
    tiles = [
        ("duration", figures.duration(history.elapsed_s or summary.seconds)),
        ("steps", f"{summary.step:,}"),
    ]
    if summary.samples_per_s:
        tiles.append(("samples/s", figures.count(summary.samples_per_s)))
    elif (rates := _rates(history)) is not None:
        tiles.append(("samples/s", figures.count(float(rates.y[-1]))))
    if summary.size > 1:
        tiles.append(("waiting", figures.percent(summary.wait_share)))
    if summary.sent_bytes:
        tiles.append(("sent", figures.size(summary.sent_bytes)))
    if summary.coded and summary.coded.bytes_after:
        times, what = summary.coded.change
        tiles.append((f"{what}, by {summary.coded.codec}", times))
    if f"{MEAN}loss" in history.metrics:
        tiles.append(("loss, last epoch", _last(history.metrics[f"{MEAN}loss"])))
    elif "loss" in history.scalars:
        tiles.append(("last loss", _last(history.scalars["loss"])))
    metrics = [(clean(n), _last(curve)) for n, curve in history.metrics.items() if not n.startswith(MEAN)]
    tiles += metrics[:8]
    cells = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _last(curve: Curve) -> str:
    return figures.number(curve.values[-1]) if len(curve) else "-"


def _curves(history: History, keyed: dict[str, Any]) -> str:
    """Loss first and wide, then metrics, which are few, then the other scalars, then means over epochs."""
    named = [(name, curve, False) for name, curve in history.scalars.items()]
    named += [(name, curve, True) for name, curve in history.metrics.items()]
    named.sort(key=lambda n: (n[0] != "loss" or n[2], n[0].startswith(MEAN), not n[2]))
    epochs, resumes = tuple(history.epochs.steps), tuple(map(float, history.resumed_steps))
    out: list[str] = []
    banded = False
    for name, curve, measured in named:
        if not len(curve) or (measured and len(curve) == 1):  # a metric taken once is a tile, not a curve
            continue
        drawn = thin(curve.steps, curve.values)
        wide = not out
        note = ""
        if len(drawn.lost):
            note = f"{len(drawn.lost):,} of {len(curve):,} not finite, first at step {int(drawn.lost[0]):,}"
        banded |= drawn.low is not None
        chart = Chart(
            title=clean(name),
            drawn=drawn,
            last=f"last {_last(curve)}",
            note=note,
            marks=epochs,
            resumes=resumes,
            x_range=(0.0, float(max(history.step, curve.steps[-1]))),
            wide=wide,
        )
        out.append(_add(keyed, draw, points, chart))
    marks = ["dotted lines: epochs"] if len(epochs) > 1 else []
    marks += ["dashed line: resumed"] if resumes else []
    marks += ["band: range of the values around their mean"] if banded else []
    legend = "".join(f"<span>{mark}</span>" for mark in marks)
    return f'<div class="legend">{legend}</div><div class="charts">{"".join(out)}</div>' if out else ""


def _rates(history: History) -> Drawn | None:
    rows = history.first.rows
    seconds = rows[:, 1:].sum(axis=1)
    x, sums = bins(seconds, np.stack([rows[:, 0], seconds], axis=1), _TIME_BINS)
    if not len(x) or not sums[:, 0].any():
        return None
    return Drawn(x=x, y=sums[:, 0] / sums[:, 1], lost=np.empty(0))


def _speed(history: History, keyed: dict[str, Any]) -> str:
    drawn = _rates(history)
    if drawn is None:
        return ""
    chart = Chart(title="samples/s", drawn=drawn, x_name="time", wide=True, zero=True)
    return f'<div class="charts">{_add(keyed, draw, points, chart)}</div>'


def _stacks(history: History, summary: Summary, keyed: dict[str, Any]) -> str:
    """A small chart per member; of many members, the busiest, for whom the others wait."""
    busy = {m.rank: m.busy_s for m in summary.members}
    ranks = sorted(history.times, key=lambda r: (-busy.get(r, 0.0), r))[:_MOST_STACKS]
    out = []
    for rank in sorted(ranks):
        rows = history.times[rank].rows[:, 1:]
        x, sums = bins(rows.sum(axis=1), rows, _TIME_BINS)
        if not len(x):
            continue
        whole = rows.sum(axis=0) / rows.sum()
        note = f"waits {figures.percent(whole[2])}"
        shares = sums / sums.sum(axis=1, keepdims=True)
        stack = Stack(title=f"member {rank}", x=x, shares=shares, names=SPLIT, note=note)
        out.append(_add(keyed, draw_stack, stack_points, stack))
    if not out:
        return ""
    legend = "".join(f'<span><i class="{name}"></i>{name}</span>' for name in SPLIT)
    if len(history.times) > len(ranks):
        legend += f"<span>{len(ranks)} of {len(history.times)} members: the busiest</span>"
    return f'<div class="legend">{legend}</div><div class="charts few">{"".join(out)}</div>'


def _add(keyed: dict[str, Any], drawing: Any, pointing: Any, what: Any) -> str:
    key = f"c{len(keyed)}"
    keyed[key] = pointing(what)
    drawn: str = drawing(what, key)
    return drawn


def _footer(history: History) -> str:
    said = "Made by Paceline from the events of the run."
    if history.unread:
        said += f" {history.unread} lines of them were torn and left out."
    return f"<footer>{said}</footer>"
