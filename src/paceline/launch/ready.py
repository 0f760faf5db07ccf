"""Whether hosts are ready for a run: what `preflight` finds there, judged, and told in a line.

Between the engines, which know the hosts and what leads to them, and the questions. Without a host that is not reached
an elastic run can begin, if the others have enough slots; whatever else is wrong ends it before it has begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.launch import preflight
from paceline.launch.interruptible import interruptible
from paceline.launch.preflight import HERE, Preflight, Report, Way
from paceline.launch.spec import Away, Elastic, JobSpec, Room

_AGAIN_S = 2.0  # between two attempts


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run asks of the hosts."""

    rooms: Mapping[str, Room]
    least: int  # slots on them
    listen: str  # where the launcher is reached
    port: int  # 0: any
    cwd: str
    wait_s: float = 0.0  # for hosts that are down, without which there are too few slots

    @classmethod
    def of(cls, spec: JobSpec, rooms: Mapping[str, Room], cwd: str) -> Needs:
        """Of a spec that was prepared. Members that stay have their seats, so all hosts are needed."""
        asked: Elastic | Away | None = spec.elastic or spec.away
        assert asked
        least, wait_s = sum(room.slots for room in rooms.values()), 0.0
        if spec.elastic:
            least = spec.elastic.least - spec.elastic.own_slots
        if spec.elastic and spec.elastic.least < spec.elastic.most:
            wait_s = spec.settings.join_limit_s
        return cls(rooms=rooms, least=least, listen=asked.listen, port=asked.port, cwd=cwd, wait_s=wait_s)

    def slots(self, without: Container[str] = ()) -> int:
        """On the hosts, but for some of them."""
        return sum(room.slots for name, room in self.rooms.items() if name not in without)


def begun(
    spec: JobSpec, way: Way, needs: Needs, files: Callable[[Preflight], None], say: Callable[[str], None]
) -> JobSpec:
    """As `look`; the run, which begins with the members for which there is room on the hosts that were reached."""
    report = look(way, needs, files, say)
    if not (elastic := spec.elastic):
        return spec
    room = elastic.own_slots + needs.slots(without=report.unreached)
    return replace(spec, elastic=replace(elastic, begin=max(elastic.least, min(room, spec.num_members))))


def look(way: Way, needs: Needs, files: Callable[[Preflight], None], say: Callable[[str], None]) -> Report:
    """ConfigError where the hosts do not have what the run needs; `files` sees to what it needs of those."""
    with interruptible(), Preflight(way, list(needs.rooms)) as flight:
        flight.meet(needs.cwd)
        wait(flight, needs, say)
        judge(flight.report, needs)
        files(flight)
        flight.routes(needs.listen)
        flight.measure(needs.listen, needs.port)
        judge(flight.report, needs)
    report, slots = flight.report, {name: room.slots for name, room in needs.rooms.items()}
    for line in [*report.unreached.values(), *preflight.crowded(report.facts, slots)]:
        say(f"warning: {line}")
    if report.unreached:
        who = ", ".join(report.unreached)
        say(f"the run begins without host {who}, which is used once it is reached")
    say(told(report))
    return report


def wait(flight: Preflight, needs: Needs, say: Callable[[str], None]) -> None:
    """For hosts that are down, where those that were reached have too few slots and these would do."""
    report, deadline, before = flight.report, time.monotonic() + needs.wait_s, ""
    while (
        time.monotonic() < deadline
        and not report.wrong
        and needs.slots(without=report.unreached) < needs.least
        and needs.slots(without=report.unreached.keys() - report.down) >= needs.least
    ):
        line = _waits(report, needs)
        if line != before:
            say(line)
            before = line
        time.sleep(min(_AGAIN_S, max(0.0, deadline - time.monotonic())))
        flight.meet_again(needs.cwd)


def _waits(report: Report, needs: Needs) -> str:
    down = [host for host in report.hosts if host in report.down]
    who = f"host{'s' if len(down) > 1 else ''} {', '.join(down)}"
    members = "1 member" if needs.least == 1 else f"{needs.least} members"
    room = needs.slots(without=report.unreached)
    return (
        f"waiting for {who} (reached {len(report.facts)} of {len(report.hosts)}; needs at least {members} there, and "
        f"has room for {room}), for up to {needs.wait_s:g} s: {'; '.join(report.unreached[host] for host in down)}"
    )


def require(flight: Preflight, spec: JobSpec, cwd: str, then: str) -> None:
    """ConfigError where the working directory or the script are not on a host; `then`: what to do about it."""
    for path in (cwd, *([] if spec.module else [str(Path(cwd) / spec.script)])):
        if missing := flight.exists(path):
            raise ConfigError(f"host {', '.join(missing)}: there is no {path}; {then}")


def judge(report: Report, needs: Needs) -> None:
    """Raise what would stop the run."""
    wrong = list(report.wrong)
    if needs.slots(without=report.unreached) < needs.least:
        wrong = [*report.unreached.values(), *wrong]
    if wrong:
        raise ConfigError("\n  ".join(wrong if len(wrong) == 1 else ["the hosts are not ready:", *wrong]))


def told(report: Report) -> str:
    """What was found, in a line."""
    if not report.facts:
        return f"no host was reached; members begin here, and others reach this one at {report.address[HERE]}"
    first = next(iter(report.facts.values()))
    hosts = "1 host" if len(report.facts) == 1 else f"{len(report.facts)} hosts"
    by = f" ({report.interface[HERE]})" if report.interface.get(HERE) else ""
    text = f"{hosts} with Python {first.python}, torch {first.torch}; this one is reached at {report.address[HERE]}{by}"
    if slowest := report.slowest:
        (source, to), link = slowest
        text += f"; slowest link {source} to {to}: {link.bytes_per_s * 8 / 1e6:.0f} Mbit/s, {link.rtt_s * 1e3:.2g} ms"
    return text
