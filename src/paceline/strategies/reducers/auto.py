"""The choice of a codec: predicted from what was measured, then tried.

    passes 1 to 3    travel as they are; the last one's gradients are kept for the rehearsal
    rehearsal        the link is measured; every candidate encodes and decodes them, as it would among so many members,
                     without sending; its bytes over the link are its time on the wire
    prediction       step = (step so far − what it waited for the exchange) + what the exchange takes longer than the
                     backward pass can hide
    trial            the three that are predicted to be fastest run a few steps each; the fastest stays

All numbers that decide are agreed on by the members (the slowest counts), so all decide alike.

Every hundred passes they compare what the wire takes with what it took. On busy hosts that changes by itself, so it is
no more than a reason to measure the link again, as before the rehearsal. Only where buckets would take half as long
again, or a third less, in the median of three measurements and once more some passes later, is the choice made anew.
After a false alarm the next look is twice as far off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.strategies.reducers.coder import Bucket, Coder, Way
from paceline.strategies.reducers.method import CANDIDATES, Auto, Method
from paceline.transport.arena import Collective
from paceline.transport.link import Link

_PLAIN = 3  # passes
_TRIAL = 6  # passes, of which the first is not counted
_TRIED = 3
_AGAIN = 100  # passes between two looks at the wire
_SELDOM = 1600  # passes between them at the most
_SOON = 20  # passes until a link that seems to have changed is measured once more
_CHANGED = 1.5  # times as long, or as short
_BRIEF_S = 1e-3  # what takes less may take any time
_COARSE = 32  # times fewer bytes: what latency is to be judged by
_REHEARSED_BYTES = 32 << 20
_CLOSE = 1.03  # candidates stand in the order of fidelity: a later one must be so much faster

MakeWay = Callable[[Method, Coder, Bucket, tuple[int, int]], Way]


class Rehearsal:
    """Members that all say what this one says; counts how long a link would take for it.

    Where each member sums a part, one stands for all: it sums the whole, and sends as much as one would of n.
    """

    def __init__(self, collective: Collective, link: Link, *, parts: bool) -> None:
        self.size = 1 if parts else collective.size
        self.position = 0 if parts else collective.position
        self.link = link
        self.wire_s = 0.0
        self.sent_bytes = 0
        self._size = collective.size

    def all_reduce(self, flat: torch.Tensor) -> None:
        self.wire_s += self.link.all_reduce_s(self._size, flat.nbytes)

    def all_reduce_bytes(self, nbytes: int) -> int:
        return 0  # nothing is sent

    def all_gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        out.view(self.size, -1)[:] = flat
        self.wire_s += self.link.direct_s(self._size, flat.nbytes * self.size / self._size)

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(flat)
        self.wire_s += self.link.direct_s(self._size, flat.nbytes / self._size)

    def measure(self) -> None: ...


@dataclass
class Times:
    """Of some passes on this member: from begin to begin, what was waited for, and what could have hidden it."""

    step: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)


class Chooser:
    """Chooses for one coder. All members that reduce call `before` for the same buckets."""

    def __init__(self, coder: Coder, make_way: MakeWay) -> None:
        assert isinstance(coder.asked.codec, Auto)
        self._coder = coder
        coder.method = coder.chosen or Method()  # whatever was being tried before
        self._make_way = make_way
        self._candidates = CANDIDATES[coder.asked.codec.fidelity]
        self._pass = 0  # of the coder's, the last one seen
        self._seen = 0
        self._times = Times()
        self._kept: list[tuple[Bucket, torch.Tensor]] = []
        self._trials: list[Method] = []  # still to be tried
        self._tried: dict[int, float] = {}  # candidate -> seconds of a step
        self._predicted: list[float] = []
        self._link: Link | None = None  # when the choice was made
        self._wire_s = 0.0  # of a pass, then or at the last false alarm
        self._every = _AGAIN
        self._look_at = _AGAIN  # the pass of the next look at the wire
        self._doubted = False  # the link seemed to have changed at the last look
        self._since = (0, 0.0)  # passes and seconds on the wire when the look at the wire began
        self._until = 0  # the pass at which something is to be decided
        self._begun = 0.0
        self._why = ""

    def before(self, flat: torch.Tensor, bucket: Bucket, buckets: Sequence[Bucket], collective: Collective) -> None:
        """A bucket is about to be reduced; with the first one of a pass, there may be something to decide."""
        coder = self._coder
        if coder.passes <= coder.warmup:
            return
        if coder.passes != self._pass:
            self._note_times()
            self._pass = coder.passes
            self._seen += 1
            self._next(buckets, collective)
            self._begun = coder.first_at = time.perf_counter()
        kept = sum(t.nbytes for _, t in self._kept)
        if self._until == 0 and self._seen == _PLAIN and kept < _REHEARSED_BYTES and coder.chosen is None:
            self._kept.append((bucket, flat.clone()))

    # ---- what is decided when

    def _next(self, buckets: Sequence[Bucket], collective: Collective) -> None:
        coder, link = self._coder, collective.link
        if link is None or not any(b.pieces for b in buckets):
            if coder.chosen is None:
                where = "all members share this host" if link is None else "no parameter is large enough"
                self._settle(Method(), f"codec auto: none, since {where}")
            return
        if coder.chosen is None and self._seen > _PLAIN and not self._until:
            self._predict(buckets, collective)
        elif self._until and self._seen >= self._until:
            self._judge(collective)
        elif coder.chosen is not None and self._seen >= self._look_at:
            self._look(buckets, collective)

    def _predict(self, buckets: Sequence[Bucket], collective: Collective) -> None:
        """Rehearse all candidates and line up the best for trials."""
        spoilt = any(not bucket.finite(flat) for bucket, flat in self._kept)
        if _slowest([float(spoilt)], collective)[0]:  # nothing can be learned from these
            self._kept.clear()
            self._seen = _PLAIN - 1
            return
        link = self._link = self._link or _measured(collective)
        share = sum(b.numel for b in buckets) / sum(b.numel for b, _ in self._kept)
        exchange = [share * self._rehearse(method, link, collective) for method in self._candidates]
        times = self._times
        wait_s, hidden_s = _middle(times.exposed), _middle(times.hidden)
        own = [_middle(times.step) - wait_s + max(0.0, e - hidden_s) for e in exchange]
        self._predicted = _slowest(own, collective)
        order = sorted(range(len(own)), key=lambda i: self._predicted[i])
        self._trials = [self._candidates[i] for i in order[:_TRIED]]
        self._tried = {}
        self._why = f"the link carries {_told(link)}"
        self._kept.clear()
        self._try(self._trials.pop(0))

    def _rehearse(self, method: Method, link: Link, collective: Collective) -> float:
        """Seconds of one pass over what was kept."""
        parts, best = method.back is not None, float("inf")
        place = (0, 1) if parts else (collective.position, collective.size)
        coder = self._coder.rehearsing()
        ways = [(self._make_way(method, coder, bucket, place), flat) for bucket, flat in self._kept]
        for _ in range(3):
            stage, began = Rehearsal(collective, link, parts=parts), time.perf_counter()
            coder.begin({})
            for way, flat in ways:
                way.reduce(flat.clone(), stage)
            best = min(best, time.perf_counter() - began + stage.wire_s)
        return best

    def _try(self, method: Method) -> None:
        self._coder.method = method
        self._until = self._seen + _TRIAL
        self._times = Times()
        self._since = (self._seen, self._coder.cost.wire_s)

    def _judge(self, collective: Collective) -> None:
        """A trial has ended: note it, and go on to the next or choose."""
        coder = self._coder
        (taken,) = _slowest([_middle(self._times.step[1:])], collective)
        wire_s = self._wire_per_pass(collective)
        index = self._candidates.index(coder.method)
        self._tried[index] = taken
        if self._trials:
            self._try(self._trials.pop(0))
            return
        best = min(self._tried, key=lambda i: (self._tried[i], i))
        for i in sorted(self._tried):
            if self._tried[i] <= _CLOSE * self._tried[best]:
                best = i
                break
        method, predicted = self._candidates[best], self._predicted
        others = ", ".join(
            f"{1e3 * predicted[i]:.3g} with {self._candidates[i].words}" for i in sorted({0, *self._tried} - {best})
        )
        self._wire_s = wire_s if method is coder.method else 0.0
        self._settle(
            method,
            f"codec auto: {method.words}, since {self._why}: a step predicted {1e3 * predicted[best]:.3g} ms, "
            f"measured {1e3 * self._tried[best]:.3g}; predicted {others}",
        )

    def _settle(self, method: Method, line: str) -> None:
        self._coder.method = self._coder.chosen = method
        self._until = 0
        self._look_at = self._seen + self._every
        self._since = (self._seen, self._coder.cost.wire_s)
        self._times = Times()
        self._coder.tell(line)

    def _look(self, buckets: Sequence[Bucket], collective: Collective) -> None:
        """Whether the wire takes about what it took, and if not, whether that is the link's doing."""
        wire_s = self._wire_per_pass(collective)
        link = self._link = self._link or _measured(collective)  # of a run that was resumed, only now
        self._since = (self._seen, self._coder.cost.wire_s)
        self._times = Times()
        before = self._wire_s = self._wire_s or wire_s
        self._look_at = self._seen + self._every
        if not self._doubted and not _differ(wire_s, before):
            return
        now = _measured(collective)
        if not _changed(link, now, [b.numel * b.dtype.itemsize for b in buckets], collective.size):
            self._wire_s, self._doubted = wire_s, False
            self._every = min(2 * self._every, _SELDOM)
            self._look_at = self._seen + self._every
        elif not self._doubted:
            self._doubted, self._look_at = True, self._seen + _SOON
        else:
            self._coder.tell(
                f"codec auto: the link carries {_told(now)} instead of {_told(link)}, and the wire takes "
                f"{1e3 * wire_s:.3g} ms a step instead of {1e3 * before:.3g}: choosing again"
            )
            self._link, self._doubted = now, False
            self._coder.method, self._coder.chosen = Method(), None
            self._seen, self._wire_s, self._every = 0, 0.0, _AGAIN

    # ---- what was measured

    def _wire_per_pass(self, collective: Collective) -> float:
        """Of the member that waited least for others."""
        passes, wire_s = self._since
        own = (self._coder.cost.wire_s - wire_s) / max(1, self._seen - passes)
        return -_slowest([-own], collective)[0]

    def _note_times(self) -> None:
        """Of the pass that has ended, and of the step up to now."""
        coder, times = self._coder, self._times
        if self._begun:
            times.step.append(time.perf_counter() - self._begun)
            times.exposed.append(coder.waited_s)
            times.hidden.append(coder.hidden_s)


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _measured(collective: Collective) -> Link:
    collective.measure()
    assert collective.link is not None, "members that share memory choose nothing"
    return collective.link


def _differ(seconds: float, before: float) -> bool:
    return max(seconds, before) > _BRIEF_S and not before / _CHANGED <= seconds <= before * _CHANGED


def _changed(before: Link, now: Link, buckets: Sequence[int], size: int) -> bool:
    """Whether buckets of so many bytes, or coarse codes of them, take much longer or shorter."""

    def seconds(link: Link, fewer: int) -> float:
        return sum(link.all_reduce_s(size, nbytes / fewer) for nbytes in buckets)

    return any(_differ(seconds(now, fewer), seconds(before, fewer)) for fewer in (1, _COARSE))


def _told(link: Link) -> str:
    return f"{link.bytes_per_s / 1e6:.3g} MB/s at {1e3 * link.latency_s:.2g} ms"


def _slowest(values: Sequence[float], collective: Collective) -> list[float]:
    """The largest of everyone's, one by one."""
    everyone = torch.empty(collective.size * len(values), dtype=torch.float64)
    collective.all_gather(torch.tensor(values, dtype=torch.float64), everyone)
    return everyone.view(collective.size, -1).amax(0).tolist()
