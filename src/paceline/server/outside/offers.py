"""What guests have brought since the last round: one sum, of as many differences as come.

    Σ = Σⱼ mⱼ·dⱼ,   mⱼ = min(samplesⱼ / (1 + ageⱼ), samples of a mean member in the last round)

A guest brings one difference a round at most, of weights that are at most `oldest` rounds old, and a round takes those
of so many guests as may call at a time. It is decoded parameter by parameter: once to see that it is finite and not
much longer than the members' own, then into the sum. While a round is being held (`close` to `settle`) newcomers wait:
what the first member has told the others of the sum stays true.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from paceline.codecs import Codec, PayloadError
from paceline.core.errors import ConfigError
from paceline.server.outside import calls as c

_LONGEST = 10.0  # times the members' longest difference of the last round, that a guest's may be
_ROUND_S = 30.0  # that one waits while a round is held
_KNOWN = 4096  # guests that are remembered


class Mass(NamedTuple):
    """What a sum weighs, in samples or tokens, and how many guests' it is."""

    weight: float = 0.0
    guests: float = 0.0


@dataclass
class Story:
    """For the summary."""

    guests: int = 0
    brought: int = 0  # differences
    samples: float = 0.0
    rounds: int = 0  # that had some
    refused: dict[str, int] = field(default_factory=dict)  # why, how often


class Offers:
    """For parameters of these numbers of elements, from at most so many guests a round. `tokens`: these weigh, not
    samples."""

    def __init__(self, numels: Sequence[int], *, most: int, oldest: int, tokens: bool) -> None:
        self._numels = list(numels)
        self._most, self._oldest, self._tokens = most, oldest, tokens
        self._changed = threading.Condition()
        self._closed = False
        self._round = 0
        self._sum: list[torch.Tensor] | None = None
        self._pending: dict[str, tuple[int, float]] = {}  # by guest: the number and the samples of what is in the sum
        self._weight = 0.0
        self._blind = False  # something is in the sum that was compared with nothing
        self._member = 0.0  # samples or tokens of a mean member in the last round; 0: none was held yet
        self._squares = 0.0  # of the members' longest difference then
        self._merged: dict[str, int] = {}  # by guest: the number of what was in a round last
        self.story = Story()

    # ---- a guest's call; in its thread

    def asked(self, call: c.Call) -> c.Reply:
        """Whether this guest may bring something."""
        with self._changed:
            stale, why = self._judge(call.guest, call.round)
            return c.Reply(
                name="",
                round=self._round,
                taken=self._taken(call.guest),
                takes=not why,
                stale=stale,
                why=why,
            )

    def bring(self, guest: str, bring: c.Bring, data: torch.Tensor) -> c.Thanks:
        """Take a difference in, or say why not."""
        try:
            codec = c.make_code(bring.codec)
            payloads = self._checked(bring, codec, data)
            length = self._length(codec, payloads)
        except (ConfigError, PayloadError) as error:
            return self._refuse("it cannot be read", str(error))
        if not math.isfinite(length):
            return self._refuse("not finite", "its values are not finite")
        with self._changed:
            if not self._changed.wait_for(lambda: not self._closed, _ROUND_S):
                return c.Thanks(taken=False, why="a round is being held: come again")
            if bring.number <= self._taken(guest):
                return c.Thanks(taken=True)
            stale, why = self._judge(guest, bring.round)
            if why:
                return self._refuse("too old", why) if stale else c.Thanks(taken=False, why=why)
            if self._squares and length > _LONGEST**2 * self._squares:
                times = math.sqrt(length / self._squares)
                return self._refuse("too long", f"it is {times:.3g} times as long as the members' longest")
            self._add(guest, bring, codec, payloads)
            self._blind = self._blind or not self._squares
            return c.Thanks(taken=True)

    def _judge(self, guest: str, round: int) -> tuple[bool, str]:
        """Whether what it has is of no use any more, and why it is not taken; empty: it is."""
        if round < 0:
            return False, "it has no weights yet"
        if round > self._round:
            return True, f"it is of round {round}, and the run, which was resumed, is in round {self._round} again"
        if (age := self._round - round) > self._oldest:
            return True, f"it is {age} rounds old, and {self._oldest} are taken at most"
        if guest in self._pending:
            return False, "one of its differences is in this round already"
        if len(self._pending) >= self._most:
            return False, f"this round has what {self._most} guests have brought, and takes no more"
        return False, ""

    def _taken(self, guest: str) -> int:
        return self._pending[guest][0] if guest in self._pending else self._merged.get(guest, 0)

    def _checked(self, bring: c.Bring, codec: Codec, data: torch.Tensor) -> list[torch.Tensor]:
        for name in ("samples", "tokens") if self._tokens else ("samples",):
            if not 0 < getattr(bring, name) < 1e15:
                raise ConfigError(f"{name}={getattr(bring, name)!r}: more than 0 are needed")
        if bring.number < 1:
            raise ConfigError(f"number={bring.number}: from 1")
        return c.take_apart(data, check_sizes(bring.sizes, self._numels, codec))

    def _length(self, codec: Codec, payloads: Sequence[torch.Tensor]) -> float:
        total = 0.0
        for payload, numel in zip(payloads, self._numels):
            values = torch.zeros(numel)
            codec.decode_add(payload, values)
            total += float(values.norm()) ** 2
        return total

    def _add(self, guest: str, bring: c.Bring, codec: Codec, payloads: Sequence[torch.Tensor]) -> None:
        mass = (bring.tokens if self._tokens else bring.samples) / (1 + self._round - bring.round)
        mass = min(mass, self._member) if self._member else mass
        if self._sum is None:
            self._sum = [torch.zeros(numel) for numel in self._numels]
        for payload, total in zip(payloads, self._sum):
            codec.decode_add(payload, total, mass)
        self._weight += mass
        self._pending[guest] = (bring.number, bring.samples)

    def _refuse(self, kind: str, why: str) -> c.Thanks:
        self.story.refused[kind] = self.story.refused.get(kind, 0) + 1
        return c.Thanks(taken=False, stale=True, why=why)

    # ---- a round; in the training thread

    def close(self, squares: float) -> Mass:
        """A round begins, in which the first member's own difference has this sum of squares: what there is for it."""
        with self._changed:
            self._closed = True
            if self._blind and self._sum:
                length = sum(float(total.norm()) ** 2 for total in self._sum) / self._weight**2
                if not length <= _LONGEST**2 * squares:
                    for _ in self._pending:
                        self._refuse("too long", "")
                    self._clear()
                self._blind = False
            return Mass(self._weight, float(len(self._pending)))

    def add_to(self, index: int, view: torch.Tensor, share: float) -> None:
        """The guests' mean difference of one parameter, times its share of the average."""
        if self._sum is not None and self._weight:
            view.add_(self._sum[index].view(view.shape).to(view), alpha=share / self._weight)

    def settle(self, round: int, merged: bool, member: float = 0.0, squares: float = 0.0) -> None:
        """The exchange is over; `merged`: with the sum in it. `member`: what a mean one had seen."""
        with self._changed:
            if merged:
                self._merge()
                self._member, self._squares = member or self._member, squares or self._squares
            self._round, self._closed = round, False
            self._changed.notify_all()

    def _merge(self) -> None:
        story = self.story
        for guest, (number, samples) in self._pending.items():
            story.guests += guest not in self._merged
            story.brought += 1
            story.samples += samples
            self._merged.pop(guest, None)
            self._merged[guest] = number
        story.rounds += bool(self._pending)
        while len(self._merged) > _KNOWN:
            del self._merged[next(iter(self._merged))]
        self._clear()

    def _clear(self) -> None:
        self._sum, self._weight = None, 0.0
        self._pending.clear()

    @property
    def waiting(self) -> int:
        """Differences that no round has had yet."""
        return len(self._pending)

    def state(self) -> dict[str, Any]:
        return {"merged": dict(self._merged), "story": asdict(self.story)}

    def load(self, state: dict[str, Any]) -> None:
        self._merged = dict(state.get("merged", {}))
        self.story = Story(**state.get("story", {}))


def check_sizes(sizes: list[int], numels: Sequence[int], code: Codec) -> list[int]:
    """Those of a payload for each parameter, before memory is taken for them."""
    most = [code.nbytes(numel) for numel in numels]
    if len(sizes) != len(most) or not all(0 <= size <= limit for size, limit in zip(sizes, most)):
        raise ConfigError(f"sizes of {len(sizes)} payloads do not fit {len(most)} parameters")
    return sizes
