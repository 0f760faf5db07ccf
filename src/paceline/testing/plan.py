"""Which faults happen to a run, and when: a plan that reads as the code that makes it.

    >>> plan = FaultPlan().kill(member=2, step=7).pause(member=1, step=9, for_s=2.0)
    >>> plan
    FaultPlan().kill(member=2, step=7).pause(member=1, step=9, for_s=2.0)
    >>> FaultPlan.from_json(plan.to_json()) == plan
    True

A plan does nothing by itself: `Faults` (testing/faults.py) carries it out. `step=7` means as soon as seven steps are
seen to be done, `at_s=7` seven seconds after the start; several faults at the same step happen at once. `doing` waits
until a member's status has a word in it, such as "checkpointing", and `after_s` so much longer.

Targets are words: "member 2", "first" (whoever has rank 0), "scheduler", "agent 0" (of hosts, the one on host 0; else
the oldest), "server 0", "host 1" (all that runs there). `member=2` and `member="first"` are short for two of them.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, TypedDict, Unpack

import msgspec

from paceline.core.errors import ConfigError, nearest
from paceline.testing.hosts import Way, bits_per_s

_TARGET = re.compile(r"first|scheduler|(?:member|agent|server|host) \d+")
KINDS = ("kill", "pause", "partition", "slow", "reset", "corrupt", "fill_disk", "jump_clock", "scale")


class _Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    step: int | None = None
    at_s: float | None = None
    doing: str = ""
    after_s: float = 0.0


class When(TypedDict, total=False):
    """At which moment; what is left out does not matter."""

    step: int | None  # as soon as so many steps are done
    at_s: float | None  # seconds after the start
    doing: str  # as soon as the member, or anybody, says in its status that it does this, such as "checkpointing"
    after_s: float  # seconds after all that


class Kill(_Fault, frozen=True, kw_only=True, tag="kill"):
    """A signal, by default SIGKILL."""

    target: str
    signal: str = "KILL"


class Pause(_Fault, frozen=True, kw_only=True, tag="pause"):
    """SIGSTOP, then SIGCONT."""

    target: str
    for_s: float


class Partition(_Fault, frozen=True, kw_only=True, tag="partition"):
    """Hosts and all others lose each other's frames; see `Hosts.partition`."""

    hosts: tuple[int, ...]
    way: Way = "both"
    for_s: float


class Slow(_Fault, frozen=True, kw_only=True, tag="slow"):
    """A host's card has another speed for a while."""

    host: int
    rate: str
    for_s: float


class Reset(_Fault, frozen=True, kw_only=True, tag="reset"):
    """The connections of a host end."""

    host: int


class Corrupt(_Fault, frozen=True, kw_only=True, tag="corrupt"):
    """A byte is flipped in what a member's host sends."""

    target: str
    after_bytes: int = 0


class FillDisk(_Fault, frozen=True, kw_only=True, tag="fill_disk"):
    """The disk of the run directory has no room for a while."""

    for_s: float


class JumpClock(_Fault, frozen=True, kw_only=True, tag="jump_clock"):
    """A member's time.time(), or everybody's, jumps and stays so."""

    by_s: float
    target: str = "all"


class Scale(_Fault, frozen=True, kw_only=True, tag="scale"):
    """Somebody asks for another number of members."""

    size: int


Fault = Kill | Pause | Partition | Slow | Reset | Corrupt | FillDisk | JumpClock | Scale


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """From what a plan was drawn."""

    seed: int
    faults: int
    members: int
    steps: int
    kinds: tuple[str, ...]
    hosts: int = 0


class FaultPlan:
    """Faults in the order in which they were added. Each method returns a new plan with one more."""

    def __init__(self, faults: Iterable[Fault] = (), drawn: Drawn | None = None) -> None:
        self.faults = tuple(faults)
        self.drawn = drawn  # the first `drawn.faults` are from there

    # ---- faults

    def kill(
        self,
        target: str = "",
        *,
        member: int | str | None = None,
        signal: str = "KILL",
        **when: Unpack[When],
    ) -> FaultPlan:
        """Send a signal: "KILL" ends it at once, "TERM" asks it to leave, as a host that is taken away does."""
        if f"SIG{signal}" not in signals.Signals.__members__:
            known = [name.removeprefix("SIG") for name in signals.Signals.__members__]
            raise ConfigError(f"signal={signal!r}: {nearest(signal, known)}")
        return self._with(Kill(target=_target(target, member), signal=signal, **when))

    def pause(
        self,
        target: str = "",
        *,
        member: int | str | None = None,
        for_s: float,
        **when: Unpack[When],
    ) -> FaultPlan:
        """Stop it (SIGSTOP), and let it go on after a while: it may find that the others went on without it."""
        return self._with(Pause(target=_target(target, member), for_s=for_s, **when))

    def partition(
        self,
        hosts: Iterable[int],
        *,
        for_s: float,
        way: Way = "both",
        **when: Unpack[When],
    ) -> FaultPlan:
        """Part these hosts from all others; "out": only what they send is lost, "in": only what is sent to them."""
        if way not in ("both", "out", "in"):
            raise ConfigError(f"way={way!r}: {nearest(way, ('both', 'out', 'in'))}")
        return self._with(Partition(hosts=tuple(hosts), way=way, for_s=for_s, **when))

    def slow(self, host: int, rate: str, *, for_s: float, **when: Unpack[When]) -> FaultPlan:
        """Give a host's card another speed for a while, such as "1mbit"."""
        bits_per_s(rate)
        return self._with(Slow(host=host, rate=rate, for_s=for_s, **when))

    def reset(self, host: int, **when: Unpack[When]) -> FaultPlan:
        """End all connections of a host with others."""
        return self._with(Reset(host=host, **when))

    def corrupt(
        self,
        target: str = "",
        *,
        member: int | str | None = None,
        after_bytes: int = 0,
        **when: Unpack[When],
    ) -> FaultPlan:
        """Flip a byte in what the host of a member sends, after so many more bytes; no checksum of TCP notices."""
        fault = Corrupt(target=_target(target, member), after_bytes=after_bytes, **when)
        return self._with(fault)

    def fill_disk(self, *, for_s: float, **when: Unpack[When]) -> FaultPlan:
        """Leave no room on the run directory's disk for a while (`SmallDisk`)."""
        return self._with(FillDisk(for_s=for_s, **when))

    def jump_clock(
        self,
        by_s: float,
        target: str = "all",
        *,
        member: int | str | None = None,
        **when: Unpack[When],
    ) -> FaultPlan:
        """Let time.time() jump, forward or back, on a member or on all; time.monotonic() goes on (`Clocks`)."""
        word = _target(target if target != "all" else "", member) if target != "all" or member is not None else "all"
        return self._with(JumpClock(by_s=by_s, target=word, **when))

    def scale(self, size: int, **when: Unpack[When]) -> FaultPlan:
        """Ask for so many members, as `paceline scale` does; of an elastic run."""
        return self._with(Scale(size=size, **when))

    # ---- at random

    @classmethod
    def random(
        cls,
        seed: int,
        faults: int,
        members: int,
        steps: int,
        kinds: Sequence[str] = ("kill", "pause"),
        hosts: int = 0,
    ) -> FaultPlan:
        """So many faults of these kinds, spread over the steps; the same for the same seed. It prints its seed.

        >>> FaultPlan.random(seed=3, faults=2, members=4, steps=50)
        FaultPlan.random(seed=3, faults=2, members=4, steps=50, kinds=('kill', 'pause'))
        """
        for kind in kinds:
            if kind not in KINDS:
                raise ConfigError(f"kinds: {kind!r}: {nearest(kind, KINDS)}")
        between = {"partition", "slow", "reset"} & set(kinds)
        if between and hosts < 2:
            raise ConfigError(f"hosts={hosts}: {', '.join(sorted(between))} happen between 2 hosts or more")
        if faults < 0 or members < 1 or steps < 2 or not kinds:
            raise ConfigError(
                f"faults={faults}, members={members}, steps={steps}, kinds={tuple(kinds)}: 0 or more faults of at "
                "least one kind, to 1 or more members, in 2 or more steps"
            )
        dice = Random(seed)
        plan = cls()
        for step in sorted(dice.randrange(1, steps) for _ in range(faults)):
            plan = plan._draw(dice, dice.choice(list(kinds)), step, members, hosts)
        drawn = Drawn(seed=seed, faults=faults, members=members, steps=steps, kinds=tuple(kinds), hosts=hosts)
        return cls(plan.faults, drawn)

    def _draw(self, dice: Random, kind: str, step: int, members: int, hosts: int) -> FaultPlan:
        member, host = dice.randrange(members), dice.randrange(max(hosts, 1))
        for_s = round(dice.uniform(0.2, 2.0), 2)
        when: When = {"step": step, "after_s": round(dice.uniform(0.0, 0.05), 3)}  # anywhere in a step
        match kind:
            case "kill":
                return self.kill(member=member, **when)
            case "pause":
                return self.pause(member=member, for_s=for_s, **when)
            case "partition":
                ways: tuple[Way, ...] = ("both", "both", "out", "in")
                return self.partition([host], for_s=for_s, way=dice.choice(ways), **when)
            case "slow":
                return self.slow(host, dice.choice(("1mbit", "10mbit", "100mbit")), for_s=for_s, **when)
            case "reset":
                return self.reset(host, **when)
            case "corrupt":
                return self.corrupt(member=member, after_bytes=dice.randrange(1_000_000), **when)
            case "fill_disk":
                return self.fill_disk(for_s=for_s, **when)
            case "scale":
                return self.scale(dice.randrange(members) + 1, **when)
            case _:
                return self.jump_clock(dice.choice((-3600.0, -5.0, 5.0, 3600.0)), member=member, **when)

    # ---- written down

    def to_json(self) -> str:
        plan: dict[str, Any] = {"faults": self.faults}
        if self.drawn:
            plan["drawn"] = self.drawn
        return msgspec.json.encode(plan).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> FaultPlan:
        try:
            plan = msgspec.json.decode(text, type=_Written)
        except msgspec.DecodeError as error:
            raise ConfigError(f"this is no plan of faults: {error}") from None
        return cls(plan.faults, plan.drawn)

    def __repr__(self) -> str:
        words, rest = "FaultPlan()", self.faults
        if self.drawn:
            given = [
                f"{name}={getattr(self.drawn, name)!r}" for name in ("seed", "faults", "members", "steps", "kinds")
            ]
            given += [f"hosts={self.drawn.hosts}"] if self.drawn.hosts else []
            words, rest = f"FaultPlan.random({', '.join(given)})", self.faults[self.drawn.faults :]
        return words + "".join(map(_call, rest))

    def __str__(self) -> str:
        """The plan, and below it what was drawn, a fault a line."""
        if not self.drawn:
            return repr(self)
        return "\n".join([repr(self), *(f"  {_call(fault)}" for fault in self.faults[: self.drawn.faults])])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FaultPlan) and (self.faults, self.drawn) == (other.faults, other.drawn)

    def __hash__(self) -> int:
        return hash((self.faults, self.drawn))

    def _with(self, fault: Fault) -> FaultPlan:
        if fault.step is not None and fault.at_s is not None:
            raise ConfigError(f"step={fault.step}, at_s={fault.at_s}: a fault comes at a step or at a time, not both")
        times = {
            name: getattr(fault, name, None) for name in ("step", "at_s", "for_s", "after_s", "after_bytes", "size")
        }
        for name, value in times.items():
            if value is not None and not value >= 0:
                raise ConfigError(f"{name}={value}: must be 0 or more")
        return FaultPlan((*self.faults, fault), self.drawn)


class _Written(msgspec.Struct, forbid_unknown_fields=True):
    faults: tuple[Fault, ...]
    drawn: Drawn | None = None


def _target(word: str, member: int | str | None) -> str:
    if member is not None and not word:
        word = "first" if member == "first" else f"member {member}"
    elif member is not None:
        raise ConfigError(f"target={word!r}, member={member!r}: give one of them")
    if not _TARGET.fullmatch(word):
        raise ConfigError(f"target={word!r}: give member=2, or 'first', 'scheduler', 'agent 0', 'server 0', 'host 1'")
    return word


def _call(fault: Fault) -> str:
    """The call that makes a fault."""
    kind = str(fault.__struct_config__.tag)
    words = []
    for field in msgspec.structs.fields(fault):
        value = getattr(fault, field.name)
        if value == field.default:
            continue
        if field.name == "target":
            number = value.removeprefix("member ")
            words.append(f"member={number}" if number != value else repr(value))
        else:
            words.append(f"{field.name}={value!r}")
    places = {
        "target": 0,
        "member": 0,
        "hosts": 0,
        "host": 0,
        "rate": 1,
        "by_s": 0,
        "size": 0,
        "step": 2,
        "at_s": 2,
        "doing": 2,
        "after_s": 2,
    }
    words.sort(key=lambda word: places.get(word.partition("=")[0], -1 if "=" not in word else 3))
    return f".{kind}({', '.join(words)})"
