"""The tables of the report. Everything that comes from the run is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path

from paceline.core.events import Event
from paceline.train import figures
from paceline.train.figures import clean, value
from paceline.train.history import History
from paceline.train.story import SPLIT
from paceline.train.summary import Share, Summary
from paceline.train.views import HEADS, Views

_MOST_ROWS = 50  # of stragglers, checkpoints and warnings


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    """`heads` that begin with a blank are of text; the others are of numbers, to the right."""
    cells = "".join(f"<th{_TEXT if h.startswith(' ') else ''}>{html.escape(h.strip())}</th>" for h in heads)
    return f'<div class="box"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


_TEXT = ' class="text"'


def members(summary: Summary) -> str:
    several = len({m.host for m in summary.members if m.host}) > 1
    there = summary.some_of_the_time

    def row(first: str, host: str, seconds: float, part: Share | Summary, kind: str) -> str:
        shares = (part.data_share, part.compute_share, part.wait_share)
        bar = "".join(f'<i class="{n}" style="width:{100 * s:.1f}%"></i>' for n, s in zip(SPLIT, shares))
        texts = [
            *[figures.duration(seconds)] * there,
            figures.count(part.samples),
            figures.count(part.samples_per_s),
            figures.size(part.sent_bytes),
        ]
        texts += [figures.percent(s) for s in shares]
        cells = "".join(f"<td>{html.escape(t)}</td>" for t in texts)
        head = f"<td{_TEXT}>{first}</td>"
        if several:
            head += f"<td{_TEXT}>{html.escape(clean(host))}</td>"
        return f'<tr class="{kind}">{head}{cells}<td><div class="bar">{bar}</div></td></tr>'

    if not summary.members:
        return ""
    rows = [
        row(
            ", ".join(filter(None, (str(m.rank), "slowest" * (m.rank == summary.slowest), m.gone))),
            m.host,
            m.seconds,
            m,
            _kind(m, summary),
        )
        for m in summary.members
    ]
    if len(summary.members) > 1:
        rows.append(row("all", "", summary.trained_s, summary, "all"))
    heads = (" member", *[" host"] * several, *["there"] * there, "samples", "samples/s", "sent", *SPLIT, "")
    return _table(heads, rows)


def _kind(member: Share, summary: Summary) -> str:
    return "slow" if member.rank == summary.slowest else "one"


def views(views: Views | None) -> str:
    if views is None:
        return ""
    rows = []
    for view in views.last[::-1]:
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in view.cells)
        rows.append(f"<tr>{cells}<td{_TEXT}>{html.escape(view.reason)}</td></tr>")
    more = views.changes - len(rows)
    note = f'<p class="note">and {more:,} before them</p>' if more else ""
    return f'<p class="facts">{html.escape(views.line)}</p>' + _table((*HEADS, " because"), rows) + note


def stragglers(history: History) -> str:
    """Who held the others up, when and why, and what was done about it."""
    rows = []
    for event in history.stragglers[-_MOST_ROWS:]:
        who, why, done = clean(event.get("member")), clean(event.get("text"), 300), clean(event.get("done"), 100)
        if event.get("kind") == "shares":
            names, samples = event.get("members"), event.get("samples")
            parts = zip(names, samples) if isinstance(names, list) and isinstance(samples, list) else ()
            who, why = "all", "shares of a global batch follow the members' speed"
            done = clean(", ".join(f"{count} samples for {name}" for name, count in parts), 300)
        cells = "".join(f"<td{_TEXT}>{html.escape(text)}</td>" for text in (who, why, done))
        rows.append(f"<tr><td>{value(event.get('step')):,.0f}</td>{cells}</tr>")
    more = len(history.stragglers) - len(rows)
    note = f'<p class="note">and {more:,} before them</p>' if more else ""
    return _table(("step", " member", " why", " done"), rows) + note if rows else ""


def checkpoints(checkpoints: list[Event], run_dir: Path) -> str:
    rows = []
    for c in checkpoints[-_MOST_ROWS:]:
        texts = [
            f"{value(c.get('step')):,.0f}",
            figures.size(c.get("bytes")),
            f"{value(c.get('seconds')):.2f} s",
        ]
        cells = "".join(f"<td>{html.escape(t)}</td>" for t in texts)
        path = clean(str(c.get("path") or "").removeprefix(f"{run_dir}/"), 300)
        rows.append(f"<tr>{cells}<td{_TEXT}>{html.escape(path)}</td></tr>")
    more = len(checkpoints) - len(rows)
    note = f'<p class="note">and {more:,} before them</p>' if more else ""
    return _table(("step", "size", "took", " path"), rows) + note if rows else ""


def warnings(history: History) -> str:
    items = []
    for (rank, message), times in list(history.warnings.items())[:_MOST_ROWS]:
        often = f" ({times:,} times)" if times > 1 else ""
        items.append(f"<li>{html.escape(f'member {rank}: {clean(message, 2000)}{often}')}</li>")
    more = len(history.warnings) - len(items)
    if more > 0:
        items.append(f"<li>and {more:,} more</li>")
    return f'<div class="box"><ul>{"".join(items)}</ul></div>' if items else ""
