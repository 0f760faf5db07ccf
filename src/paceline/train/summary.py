"""What a run came to: throughput, bytes, where the time went, who was slowest, and one piece of advice.

Made from the "end" event of the first member, which carries what every member counted; written as
summary.json and shown as a table (`shown`) when the run ends.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.events import Event
from paceline.core.lost import Lost
from paceline.train import figures
from paceline.train.views import Views

WAIT_LIMIT = 0.30  # shares of the time above which something is worth saying
DATA_LIMIT = 0.20
_SLOWER = 1.25  # how much busier than the others a member must be for them to wait for it, and not for chance
_SHORT_S = 0.005  # a step that is over sooner spends much of its time on meeting, whoever is slow
_REASONS = 8  # that are told
_EVEN = 1.02  # below which no member is called the slowest


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One member's part. The three shares are of its own time; they add up to 1."""

    rank: int  # in an elastic run, its number for life
    host: str = ""
    samples: float = 0.0
    seconds: float = 0.0
    samples_per_s: float = 0.0
    sent_bytes: float = 0.0
    data_share: float = 0.0
    compute_share: float = 0.0
    wait_share: float = 0.0
    busy_s: float = 0.0  # data and compute: its own doing, not the wait that others cause
    lost: bool = False  # it did not come to the end, and nobody at its rank did
    left: bool = False  # it was not there at the end either, but was asked to go, or went

    @property
    def gone(self) -> str:
        return "lost" if self.lost else "left" if self.left else ""


class Coded(msgspec.Struct, frozen=True, kw_only=True):
    """What a codec did, over the members that encode; times are of the member that took longest."""

    codec: str
    bytes_before: float = 0.0
    bytes_after: float = 0.0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    residual_norm: float = 0.0

    @property
    def change(self) -> tuple[str, str]:
        """How many times less or more."""
        ratio = self.bytes_before / self.bytes_after if self.bytes_after else 0.0
        return (f"{1 / ratio:.3g}x", "more") if 0 < ratio < 0.995 else (f"{ratio:.3g}x", "less")

    @property
    def line(self) -> str:
        times = zip(("encode", "wire", "decode"), (self.encode_s, self.wire_s, self.decode_s))
        before, after = figures.size(self.bytes_before), figures.size(self.bytes_after)
        return (
            f"{self.codec}: {before} became {after} ({' '.join(self.change)}); "
            + ", ".join(f"{name} {seconds:.3g} s" for name, seconds in times if seconds)
            + f"; unsaid {figures.number(self.residual_norm)}"
        )


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the workers' pushes to servers."""

    pushes: int = 0
    pushed_bytes: float = 0.0
    dropped: int = 0
    reasons: dict[str, int] = {}  # of those that were dropped, how many for each
    mean_age: float = 0.0  # versions of the server between what was read and what was pushed to
    oldest: int = 0

    @property
    def line(self) -> str:
        words = f"{self.pushes:,} pushes of {figures.size(self.pushed_bytes / max(self.pushes, 1))}"
        if self.oldest:
            words += f", {self.mean_age:.2g} versions old on average and {self.oldest:,} at most"
        if self.dropped:
            reasons = (f"{reason}: {count:,}" for reason, count in self.reasons.items())
            words += f"; {self.dropped:,} dropped ({'; '.join(reasons)})"
        return words


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """The rounds of members that train apart."""

    rounds: int = 0
    every: int = 0  # steps of the last one
    drift: float = 0.0  # members' distance from their mean then, by the norm of the weights
    guests: int = 0  # that have brought something
    guest_samples: float = 0.0
    guest_rounds: int = 0  # that had something of theirs
    refused: dict[str, int] = {}  # of what they brought, why and how often

    @property
    def line(self) -> str:
        plural = "s" if self.rounds != 1 else ""
        words = f"{self.rounds:,} round{plural}, now of {self.every:,} steps"
        if self.drift:  # there were several members, and a round that was not cut short
            words += f"; members came {self.drift:.2g} apart"
        if self.guests:
            plural = "s" if self.guests != 1 else ""
            words += (
                f"; {self.guests:,} guest{plural} brought {self.guest_samples:,.0f} samples, in {self.guest_rounds:,}"
            )
        if self.refused:
            words += "; refused: " + ", ".join(f"{why} {count:,}" for why, count in self.refused.items())
        return words


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of a guest."""

    calls: int = 0
    brought: int = 0  # differences
    samples: float = 0.0
    nbytes: float = 0.0  # both ways

    @property
    def line(self) -> str:
        what = f"{self.brought:,} times what {self.samples:,.0f} samples had taught"
        return f"{self.calls:,} calls at the run brought {what}; {figures.size(self.nbytes)} went over the link"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run; shares are over the time of all members together."""

    name: str = ""
    strategy: str = ""
    outcome: str = ""
    size: int = 1
    step: int = 0
    resumed_step: int = 0
    seconds: float = 0.0
    trained_s: float = 0.0  # of them, those in which steps were taken
    samples: float = 0.0
    samples_per_s: float = 0.0
    sent_bytes: float = 0.0
    data_share: float = 0.0
    compute_share: float = 0.0
    wait_share: float = 0.0
    slowest: int | None = None  # rank of the member with the most work of its own; None: alone, or all even
    slowest_by: float = 1.0  # its busy time over the mean of the others'
    advice: str = ""
    coded: Coded | None = None
    pushed: Pushed | None = None
    apart: Apart | None = None
    called: Called | None = None
    members: tuple[Share, ...] = ()
    lost: tuple[Lost, ...] = ()
    views: Views | None = None  # of an elastic run whose members came or went

    @property
    def some_of_the_time(self) -> bool:
        """Whether some members were not there from the beginning to the end."""
        return self.views is not None or any(m.gone for m in self.members)

    @property
    def lost_line(self) -> str:
        return "; ".join(figures.clean(str(one), 120) for one in self.lost)


def summarise(end: Event, start: Event | None = None, views: Views | None = None) -> Summary:
    """The summary of an "end" event; what "start" said about the run goes along, and how members came and went.

    >>> a = {"rank": 0, "samples": 600, "seconds": 10, "data_s": 1, "compute_s": 4, "wait_s": 5}
    >>> b = {"rank": 1, "samples": 600, "seconds": 10, "data_s": 0, "compute_s": 10, "wait_s": 0}
    >>> s = summarise({"outcome": "finished", "members": [a, b]})
    >>> s.samples_per_s, s.wait_share, s.slowest, s.slowest_by
    (120.0, 0.25, 1, 2.0)
    """
    start = start or {}
    raw = sorted(end.get("members") or [], key=lambda m: _amount(m, "rank"))
    shares = tuple(map(_share, raw))
    times = {key: sum(_amount(m, key) for m in raw) for key in ("data_s", "compute_s", "wait_s")}
    whole = sum(times.values())
    trained_s = max([_amount(end, "trained_s"), *(s.seconds for s in shares)])
    seconds = trained_s or _amount(end, "seconds")
    samples = sum(s.samples for s in shares)
    lost = _lost(end.get("lost"))
    slowest, slowest_by = _slowest(shares, by_sample=bool(lost) or views is not None)
    summary = Summary(
        name=str(start.get("name") or ""),
        strategy=str(start.get("strategy") or ""),
        outcome=str(end.get("outcome") or ""),
        size=int(_amount(start, "size")) or len(shares) or 1,
        step=int(_amount(end, "step")),
        resumed_step=int(_amount(start, "resumed_step")),
        seconds=max(_amount(end, "seconds") or seconds, _amount(end, "trained_s")),
        trained_s=trained_s,
        samples=samples,
        samples_per_s=samples / seconds if seconds else 0.0,
        sent_bytes=sum(s.sent_bytes for s in shares),
        data_share=times["data_s"] / whole if whole else 0.0,
        compute_share=times["compute_s"] / whole if whole else 0.0,
        wait_share=times["wait_s"] / whole if whole else 0.0,
        slowest=slowest,
        slowest_by=slowest_by,
        members=shares,
        coded=_coded(raw),
        pushed=_pushed(raw),
        apart=_apart(raw),
        called=_called(raw),
        lost=lost,
        views=views,
    )
    return msgspec.structs.replace(summary, advice=_advice(summary))


def _lost(told: Any) -> tuple[Lost, ...]:
    try:
        return msgspec.convert(told or [], tuple[Lost, ...])
    except msgspec.ValidationError:
        return ()


def _coded(raw: list[Any]) -> Coded | None:
    encoding = [m for m in raw if _amount(m, "bytes_before")]
    if not encoding:
        return None
    longest = {key: max(_amount(m, key) for m in encoding) for key in ("encode_s", "wire_s", "decode_s")}
    return Coded(
        codec=str(encoding[0].get("codec") or ""),
        bytes_before=sum(_amount(m, "bytes_before") for m in encoding),
        bytes_after=sum(_amount(m, "bytes_after") for m in encoding),
        residual_norm=sum(_amount(m, "residual_norm") ** 2 for m in encoding) ** 0.5,
        **longest,
    )


def _pushed(raw: list[Any]) -> Pushed | None:
    pushes = sum(_amount(m, "pushes") for m in raw)
    if not pushes:
        return None
    reasons: Counter[str] = Counter()
    for told in (m.get("drop_reasons") for m in raw):
        if isinstance(told, dict):
            reasons.update({figures.clean(reason, 80): int(_amount(told, reason)) for reason in told})
    return Pushed(
        pushes=int(pushes),
        pushed_bytes=sum(_amount(m, "pushed_bytes") for m in raw),
        dropped=int(sum(_amount(m, "dropped_pushes") for m in raw)),
        reasons=dict(reasons.most_common(_REASONS)),
        mean_age=sum(_amount(m, "ages") for m in raw) / pushes,
        oldest=int(max(_amount(m, "oldest") for m in raw)),
    )


def _apart(raw: list[Any]) -> Apart | None:
    if not raw or not _amount(raw[0], "rounds"):
        return None
    told = raw[0].get("guest_refusals")
    refused = {figures.clean(why, 80): int(_amount(told, why)) for why in told} if isinstance(told, dict) else {}
    return Apart(
        rounds=int(_amount(raw[0], "rounds")),
        every=int(_amount(raw[0], "every")),
        drift=_amount(raw[0], "drift"),
        guests=int(_amount(raw[0], "guests")),
        guest_samples=_amount(raw[0], "guest_samples"),
        guest_rounds=int(_amount(raw[0], "guest_rounds")),
        refused=refused,
    )


def _called(raw: list[Any]) -> Called | None:
    if not raw or not _amount(raw[0], "calls"):
        return None
    return Called(
        calls=int(_amount(raw[0], "calls")),
        brought=int(_amount(raw[0], "brought")),
        samples=_amount(raw[0], "brought_samples"),
        nbytes=_amount(raw[0], "called_bytes"),
    )


def write_summary(summary: Summary, run_dir: Path) -> Path:
    """Writes summary.json; a reader sees the old one or the new one, never a part."""
    path = run_dir / "summary.json"
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    os.replace(part, path)
    return path


def _amount(fields: dict[str, Any], key: str) -> float:
    x = figures.value(fields.get(key) or 0.0)
    return x if 0.0 <= x < float("inf") else 0.0


def _share(m: dict[str, Any]) -> Share:
    data, compute, wait = (_amount(m, key) for key in ("data_s", "compute_s", "wait_s"))
    whole = data + compute + wait
    seconds = _amount(m, "seconds") or whole
    samples = _amount(m, "samples")
    return Share(
        rank=int(_amount(m, "rank")),
        host=str(m.get("host") or ""),
        samples=samples,
        seconds=seconds,
        samples_per_s=samples / seconds if seconds else 0.0,
        sent_bytes=_amount(m, "sent_bytes"),
        data_share=data / whole if whole else 0.0,
        compute_share=compute / whole if whole else 0.0,
        wait_share=wait / whole if whole else 0.0,
        busy_s=data + compute,
        lost=bool(m.get("lost")),
        left=bool(m.get("left")),
    )


def _slowest(shares: tuple[Share, ...], *, by_sample: bool = False) -> tuple[int | None, float]:
    """The member with the most work of its own, and how it compares with the mean of the others.

    `by_sample`: in each sample, where some were away for a while.
    """
    shares = tuple(s for s in shares if not s.gone and (s.samples or not by_sample))
    if len(shares) < 2:
        return None, 1.0
    busy = {s.rank: _busy(s, by_sample) for s in shares}
    slowest = max(shares, key=lambda s: busy[s.rank])
    others = sum(busy[s.rank] for s in shares if s is not slowest) / (len(shares) - 1)
    by = busy[slowest.rank] / others if others else 1.0
    return (slowest.rank, by) if by > _EVEN else (None, 1.0)


def _busy(share: Share, by_sample: bool) -> float:
    return share.busy_s / share.samples if by_sample and share.samples else share.busy_s


def _advice(s: Summary) -> str:
    """One line about what stands out most, or ""."""
    if s.wait_share > WAIT_LIMIT and s.size > 1:
        return f"members wait {figures.percent(s.wait_share)} of the time{_why_they_wait(s)}"
    if s.data_share > DATA_LIMIT:
        share = figures.percent(s.data_share)
        if step_s := _short_step(s):
            return f"{share} of the time goes into fetching data for {step_s}: larger batches would pay"
        return f"{share} of the time goes into waiting for data: raise workers= of run.loader()"
    return ""


def _why_they_wait(s: Summary) -> str:
    if s.apart and s.slowest_by < _SLOWER:
        return " at their rounds: more steps between them (every=), overlap= or a codec would pay"
    if step_s := _short_step(s):
        return f": {step_s} leave little to compute between two exchanges; larger batches or fewer members would pay"
    slow = next((m for m in s.members if m.rank == s.slowest), None)
    if slow is None or s.slowest_by < _SLOWER:
        return ", for the exchange and not for one of them: larger batches or run.accumulate() make it rarer"
    if slow.data_share > slow.compute_share:
        return f" for member {slow.rank}, whose data comes late: raise workers= of run.loader()"
    busy = f" for member {slow.rank}, which is busy {s.slowest_by:.1f}x as long as the others"
    if _host_is_slow(slow, s):
        return f"{busy}: give it a faster or less loaded host"
    return f"{busy}: does only that one evaluate, save or log much, or do other programs run on its cores?"


def _short_step(s: Summary) -> str:
    """How long a step took, in words, if that is too short to share; else ""."""
    seconds, steps = s.trained_s, s.step - s.resumed_step
    if steps <= 0 or not 0 < seconds / steps < _SHORT_S:
        return ""
    return f"steps of {1000 * seconds / steps:.2g} ms"


def _host_is_slow(slow: Share, s: Summary) -> bool:
    """Whether a member's host may be to blame: there are others, and its neighbours there are as busy as it is."""
    members = [m for m in s.members if not m.gone]
    mates = [_busy(m, s.some_of_the_time) for m in members if m.host == slow.host and m is not slow]
    away = len(mates) + 1 < len(members)
    return away and all(_busy(slow, s.some_of_the_time) < _SLOWER * busy for busy in mates)
