"""How far the epoch under way has come, for `paceline status`: batches done, lent and left, or steps taken."""

from __future__ import annotations

import time

from paceline.cli.runs import Known, span
from paceline.core import queue
from paceline.core.queue import Course, Part, Queue

_OLD_S = 5.0  # after which what the server wrote is not of now


def lines(known: Known) -> list[str]:
    """Of a run that is under way; nothing where it is not, or where no epoch is."""
    if all(state == "gone" for state in known.states):
        return []
    if found := queue.read(known.directory):
        return [line for course in found.courses for line in _course(course, found)]
    first = next((d for d, state in zip(known.said, known.states) if d and d.steps and state != "gone"), None)
    if first is None:
        return []
    done = first.step - first.epoch_step
    return [f"epoch {first.epoch + 1}: {done} of {first.steps} steps done"] if 0 <= done <= first.steps else []


def _course(course: Course, found: Queue) -> list[str]:
    age = time.time() - found.at
    old = f" ({span(age)} ago)" if age > _OLD_S else ""
    head = f"loader {course.loader}, epoch {course.epoch + 1}{old}: "
    if len(course.parts) == 1:
        return [head + _part(course.parts[0], found.at)]
    named = [(f"bound to {p.label}" if p.label else "for anybody", p) for p in course.parts]
    done, total = (sum(count) for count in zip(*((p.done, _total(p)) for p in course.parts)))
    return [
        f"{head}{done} of {total} batches done",
        *(f"  {name}: {_part(part, found.at)}" for name, part in named),
    ]


def _part(part: Part, now: float) -> str:
    words = [f"{part.done} of {_total(part)} batches done", f"{part.left} left"]
    if part.lent:
        who = "; ".join(
            f"member {one.rank}: {one.batches}, the oldest for {span(now - one.since)}" for one in part.lent
        )
        words.append(f"{sum(loan.batches for loan in part.lent)} lent ({who})")
    if part.returned:
        words.append(f"{part.returned} came back from members that were lost")
    return ", ".join(words)


def _total(part: Part) -> int:
    return part.done + part.left + sum(loan.batches for loan in part.lent)
