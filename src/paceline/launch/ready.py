"""Whether hosts are ready for a run: what `preflight` finds there, judged, and told in a line.

Between the engines, which know the hosts and what leads to them, and the questions. Without a host that is not reached
an elastic run can begin, if the others have enough slots; whatever else is wrong ends it before it has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.launch import preflight
from paceline.launch.interruptible import interruptible
from paceline.launch.preflight import HERE, Preflight, Report, Way
from paceline.launch.spec import Away, Elastic, JobSpec, Room


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run asks of the hosts."""

    rooms: Mapping[str, Room]
    least: int  # slots on them
    listen: str  # where the launcher is reached
    port: int  # 0: any
    cwd: str

    @classmethod
    def of(cls, spec: JobSpec, rooms: Mapping[str, Room], cwd: str) -> Needs:
        """Of a spec that was prepared. Members that stay have their seats, so all hosts are needed."""
        asked: Elastic | Away | None = spec.elastic or spec.away
        assert asked
        least = sum(room.slots for room in rooms.values())
        if spec.elastic:
            least = spec.elastic.least - spec.elastic.own_slots
        return cls(rooms=rooms, least=least, listen=asked.listen, port=asked.port, cwd=cwd)


def look(way: Way, needs: Needs, files: Callable[[Preflight], None], say: Callable[[str], None]) -> None:
    """ConfigError where the hosts do not have what the run needs; `files` sees to what it needs of those."""
    with interruptible(), Preflight(way, list(needs.rooms)) as flight:
        flight.meet(needs.cwd)
        judge(flight.report, needs)
        files(flight)
        flight.routes(needs.listen)
        flight.measure(needs.listen, needs.port)
        judge(flight.report, needs)
    slots = {name: room.slots for name, room in needs.rooms.items()}
    for line in [*flight.report.unreached.values(), *preflight.crowded(flight.report.facts, slots)]:
        say(f"warning: {line}")
    say(told(flight.report))


def require(flight: Preflight, spec: JobSpec, cwd: str, then: str) -> None:
    """ConfigError where the working directory or the script are not on a host; `then`: what to do about it."""
    for path in (cwd, *([] if spec.module else [str(Path(cwd) / spec.script)])):
        if missing := flight.exists(path):
            raise ConfigError(f"host {', '.join(missing)}: there is no {path}; {then}")


def judge(report: Report, needs: Needs) -> None:
    """Raise what would stop the run."""
    wrong = list(report.wrong)
    left = sum(room.slots for name, room in needs.rooms.items() if name not in report.unreached)
    if left < needs.least or len(report.unreached) == len(needs.rooms):
        wrong = [*report.unreached.values(), *wrong]
    if wrong:
        raise ConfigError("\n  ".join(wrong if len(wrong) == 1 else ["the hosts are not ready:", *wrong]))


def told(report: Report) -> str:
    """What was found, in a line."""
    first = next(iter(report.facts.values()))
    hosts = "1 host" if len(report.facts) == 1 else f"{len(report.facts)} hosts"
    by = f" ({report.interface[HERE]})" if report.interface.get(HERE) else ""
    text = f"{hosts} with Python {first.python}, torch {first.torch}; this one is reached at {report.address[HERE]}{by}"
    if slowest := report.slowest:
        (source, to), link = slowest
        text += f"; slowest link {source} to {to}: {link.bytes_per_s * 8 / 1e6:.0f} Mbit/s, {link.rtt_s * 1e3:.2g} ms"
    return text
