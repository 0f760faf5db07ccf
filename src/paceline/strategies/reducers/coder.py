"""A codec at work on the gradients of one model: its settings, what earlier steps left unsaid, and what it took.

Residuals are keyed by parameter name. Where the optimizer applies a gradient at once, in proportion to the learning
rate (SGD without momentum), they stand in units of today's gradients: when the rate changes they are scaled, so that
what was left unsaid has the effect that it would have had then. That makes them tenfold at most, since the rate counts
as at least a tenth of the largest so far. A momentum would carry a residual that was scaled at a small rate on into
larger ones, and what divides by past gradients knows no proportion: there residuals stay as they are.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.codecs import Codec, Context
from paceline.codecs.codec import largest_magnitude
from paceline.strategies.reducers.method import CANDIDATES, Auto, Method
from paceline.transport.arena import Collective

SMALL = 1024  # elements: fewer travel as they are
_MOST = 10.0  # times: so much may a smaller learning rate make of what is unsaid
_KINDS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Cost:
    """What the codec took and gave, since the run began."""

    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    bytes_before: int = 0  # that would have left this member had gradients travelled as they are
    bytes_after: int = 0  # that have

    def add(self, encode_s: float, wire_s: float, decode_s: float) -> None:
        self.encode_s += encode_s
        self.wire_s += wire_s
        self.decode_s += decode_s


@dataclass(frozen=True)
class Piece:
    """The gradient of one parameter in its bucket, or a part of it."""

    name: str
    at: slice  # of the bucket
    parameter: int  # its id; 0: what lies there is of several
    rows: int = 1  # of the matrix that its memory holds
    start: int = 0  # in the parameter
    whole: int = 0  # elements of the parameter; 0: this is all of it

    @property
    def numel(self) -> int:
        return int(self.at.stop - self.at.start)

    @property
    def of(self) -> int:
        return self.whole or self.numel

    def part(self, start: int, stop: int) -> Piece:
        """What of it lies between two places of the bucket."""
        at = slice(max(start, self.at.start), min(stop, self.at.stop))
        return Piece(self.name, at, self.parameter, self.rows, self.start + at.start - self.at.start, self.of)


@dataclass(frozen=True)
class Bucket:
    """What lies in a bucket: the pieces that are large enough to be encoded, in order, with small ones between them."""

    dtype: torch.dtype
    numel: int
    pieces: tuple[Piece, ...]
    every: tuple[Piece, ...] = ()  # also the small ones
    end: int = 0  # where gradients end; behind them stand the control block and buffers
    gaps: tuple[slice, ...] = ()  # between gradients, where nothing is

    @classmethod
    def of(cls, dtype: torch.dtype, numel: int, pieces: Sequence[Piece]) -> Bucket:
        large = tuple(p for p in pieces if p.numel >= SMALL) if dtype in _KINDS else ()
        pairs = itertools.pairwise(sorted((p.at.start, p.at.stop) for p in pieces))
        gaps = tuple(slice(stop, start) for (_, stop), (start, _) in pairs if stop < start)
        return cls(dtype, numel, large, tuple(pieces), max((p.at.stop for p in pieces), default=0), gaps)

    def finite(self, flat: torch.Tensor) -> bool:
        """Whether all gradients are. Asked first, so that no part of a bucket is said without the others; buffers may
        hold what they like, and what a pass that was not finite has left in the gaps is wiped out."""
        if _finite(flat[: self.end]):
            return True
        for gap in self.gaps:
            flat[gap] = 0
        return _finite(flat[: self.end])


def _finite(x: torch.Tensor) -> bool:
    return math.isfinite(largest_magnitude(torch.view_as_real(x) if x.is_complex() else x))


class Coder:
    """How a strategy's gradients travel, with the residuals of one model by parameter name."""

    def __init__(
        self, method: Method, *, feedback: bool | None = None, warmup: int = 0, seed: int = 0,
        tell: Callable[[str], object] = lambda line: None,
        combine: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.asked = method
        self.combine = combine  # what becomes of everyone's values, where that is not their sum
        self.method = Method() if isinstance(method.codec, Auto) else method  # that gradients travel by now
        self.chosen: Method | None = None  # where the choice was left to us
        self.feedback = feedback
        self.tell = tell
        self.warmup = warmup
        self.cost = Cost()
        self.passes = 0  # backward passes so far
        self.residuals: dict[str, torch.Tensor] = {}
        self.returns: dict[str, torch.Tensor] = {}  # of sums that this member has encoded, by part of a parameter
        self.warm: dict[str, torch.Tensor] = {}  # the same on all members: where a low-rank reducer goes on
        self.spoilt: set[str] = set()  # parameters whose sums of this pass are not finite
        self.first_at = 0.0  # when the first bucket of this pass was taken up
        self.hidden_s = 0.0  # of the last pass's exchange: while the backward pass ran
        self.waited_s = 0.0  # and after it
        self._launched_at = 0.0
        self._rates: dict[int, float] = {}  # learning rates of this pass, by id of the parameter
        self._rate_of: dict[str, float] = {}  # at which a residual was left
        self._largest: dict[str, float] = {}  # rate so far, of those that have one
        self._unsay: dict[str, list[Callable[[], object]]] = {}  # what makes this pass's payloads unsaid, by parameter
        self._seed = seed

    def rehearsing(self) -> Coder:
        """One like this that has left nothing unsaid."""
        return Coder(self.asked, feedback=self.feedback)

    def begin(self, rates: dict[int, float]) -> None:
        """A backward pass begins, with the learning rates of what follows them, by id of the parameter."""
        self.passes += 1
        self._rates = rates
        self._unsay.clear()
        self.spoilt.clear()

    def launched(self) -> None:
        """The pass has ended here, and its last bucket is on its way."""
        self._launched_at = time.perf_counter()

    def end(self, uncounted: Iterable[str] = ()) -> None:
        """All sums are here. What was said of parameters whose sums nobody will apply is unsaid again."""
        self.waited_s = time.perf_counter() - self._launched_at
        self.hidden_s = max(0.0, self._launched_at - self.first_at)
        for name in uncounted:
            for unsay in self._unsay.get(name, ()):
                unsay()
        self._unsay.clear()

    def later(self, piece: Piece, unsay: Callable[[], object]) -> None:
        """Have this called at the end of the pass where the sum of this parameter does not count."""
        self._unsay.setdefault(piece.name, []).append(unsay)

    def note(self, bucket: Bucket, flat: torch.Tensor, spoilt: bool) -> None:
        """A bucket holds its sums, which are `spoilt` where a member had something that is not finite; those of half
        precision may also have become too large in being summed."""
        if spoilt or (flat.dtype == torch.float16 and not bucket.finite(flat)):
            self.spoilt.update(p.name for p in bucket.every if not _finite(flat[p.at]))

    @property
    def owes(self) -> bool:
        """Whether something is unsaid, or was until this pass: then it matters which sums are finite."""
        return bool(self.method.codec or self.residuals or self._unsay)

    # ---- state: what all members have alike, and this member's own

    def common(self) -> dict[str, Any]:
        codec, back = ("", "")
        if self.chosen:
            codec = self.chosen.codec.words if self.chosen.codec else "none"
            back = self.chosen.back.words if self.chosen.back else ""
        return {"passes": self.passes, "warm": self.warm, "codec": codec, "back": back}

    def load_common(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]
        self.warm = {name: q.clone() for name, q in state["warm"].items()}
        if state["codec"] and isinstance(self.asked.codec, Auto):
            chosen = Method.of(state["codec"], state["back"] or None)
            if chosen.words in [method.words for method in CANDIDATES[self.asked.codec.fidelity]]:
                self.method = self.chosen = chosen

    def state(self) -> dict[str, Any]:
        rates = {"rates": self._rate_of, "largest": self._largest}
        return {"residuals": self.residuals, "returns": self.returns, **rates}

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over what one or several members left unsaid."""
        self.residuals.clear()
        self.returns.clear()
        for state in states:
            for name, residual in state["residuals"].items():
                if name in self.residuals:
                    self.residuals[name] += residual
                else:
                    self.residuals[name] = residual.clone()
            self._rate_of |= state["rates"]
            self._largest |= state.get("largest", {})
            for key, part in state.get("returns", {}).items():
                other = self.returns.get(key, part.new_zeros(0))  # both begin at the same place
                short, long = sorted((part, other), key=lambda t: t.numel())
                self.returns[key] = long.clone()
                self.returns[key][: short.numel()] += short

    # ---- what is unsaid

    def takes_feedback(self, codec: Codec, piece: Piece | None = None) -> bool:
        """Small parameters that are encoded together keep nothing: they are right in the mean."""
        return Method(codec).feeds(self.feedback) and (piece is None or piece.parameter != 0)

    def residual(self, piece: Piece, rows: int = 1, device: torch.device | None = None) -> torch.Tensor:
        """Of a piece, in units of today's gradients."""
        residual = self.residuals.get(piece.name)
        if residual is None or residual.numel() % piece.of:
            residual = torch.zeros(rows * piece.of, device=device)
        elif residual.numel() != rows * piece.of:  # of another codec: what is unsaid stays, what else it kept does not
            unsaid = residual[: piece.of]
            residual = torch.cat([unsaid, unsaid.new_zeros((rows - 1) * piece.of)])
        if device is not None and residual.device != device:
            residual = residual.to(device)
        self.residuals[piece.name] = residual
        self._rescale(piece)
        return residual if rows > 1 else residual[piece.start : piece.start + piece.numel]

    def _rescale(self, piece: Piece) -> None:
        """At half the rate, what was left at the old rate weighs twice."""
        if piece.parameter not in self._rates:
            self._rate_of.pop(piece.name, None)
            return
        rate = self._rates[piece.parameter]
        largest = self._largest[piece.name] = max(rate, self._largest.get(piece.name, 0.0))
        now = max(rate, largest / _MOST)
        then = self._rate_of.get(piece.name, now)
        self._rate_of[piece.name] = now
        if now > 0 and now != then:
            if piece.name in self.residuals:  # not what else a codec keeps: momentum is in no units of steps
                self.residuals[piece.name][: piece.of].mul_(then / now)
            for key, part in self.returns.items():
                if key.rpartition("@")[0] == piece.name:
                    part.mul_(then / now)

    def flush(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Add to a bucket that travels as it is what was left unsaid before."""
        for piece in bucket.pieces:
            left = self.residuals.pop(piece.name, None)
            if left is not None and left.numel() >= piece.of:
                self.residuals[piece.name] = left
                left = self.residual(piece, left.numel() // piece.of, flat.device)
                flat[piece.at] += left[: piece.numel].to(flat.dtype)
                del self.residuals[piece.name]
                self.later(piece, functools.partial(self.residuals.__setitem__, piece.name, left))

    def fold(self, bucket: Bucket, own: Sequence[Piece]) -> None:
        """What was left of sums that this member makes no more goes to its residuals."""
        keep = {_key(piece): piece.numel for piece in own}
        pieces = {piece.name: piece for piece in bucket.pieces}
        for key, left in list(self.returns.items()):
            name, _, start = key.rpartition("@")
            if name in pieces and keep.get(key) != left.numel():
                piece, old = pieces[name], self.residuals.get(name)
                residual = self.residual(piece, max(1, old.numel() // piece.of) if old is not None else 1)
                del self.returns[key]
                residual[int(start) : int(start) + left.numel()] += left.to(residual.device)

    # ---- one piece

    def encode(
        self, codec: Codec, piece: Piece, x: torch.Tensor, out: torch.Tensor, place: tuple[int, int],
        agreed: torch.Tensor | None = None,
    ) -> int:  # fmt: skip
        """Encode a piece of this member's gradients; `place`: its position, and of how many."""
        feeds = self.takes_feedback(codec, piece)
        residual = self.residual(piece, codec.rows, x.device) if feeds or codec.rows > 1 else None
        kept = residual
        if residual is not None and residual.numel() != codec.rows * piece.numel:  # a part, whose rows lie apart
            kept = residual.view(codec.rows, -1)[:, piece.start : piece.start + piece.numel]
            residual = kept.reshape(-1)
        # Where nobody has a gradient, what else the codec keeps has to stay as it is too: momentum must not go on.
        before = residual.clone() if residual is not None and codec.rows > 1 and not bool(x.any()) else None
        n = codec.encode_into(x, residual, out, self._context(piece, place, "", agreed))
        if residual is not None and kept is not None and kept is not residual:
            kept.copy_(residual.view_as(kept))
        if kept is not None and before is not None:
            self.later(piece, functools.partial(kept.copy_, before.view_as(kept)))
        elif kept is not None and feeds:
            unsaid = kept[0] if kept.dim() == 2 else kept[: piece.numel]
            self.later(piece, lambda: codec.decode_add(out[:n], unsaid))
        return n

    def encode_sum(self, codec: Codec, piece: Piece, x: torch.Tensor, out: torch.Tensor, place: tuple[int, int]) -> int:
        """Encode a piece of what all have said, which this member has summed."""
        residual = None
        if self.takes_feedback(codec, piece):
            self._rescale(piece)
            key = _key(piece)
            residual = self.returns.get(key)
            if residual is None or residual.numel() != piece.numel:
                residual = torch.zeros(piece.numel)
            self.returns[key] = residual = residual.to(x.device)
            before = residual.clone()
            self.later(piece, lambda: residual.copy_(before))  # those whose sum it is have it back
        return codec.encode_into(x, residual, out, self._context(piece, place, "back", None))

    def _context(self, piece: Piece, place: tuple[int, int], way: str, agreed: torch.Tensor | None) -> Context:
        position, size = place
        mark = f"{self._seed}.{position}.{self.passes}.{piece.name}.{piece.start}{way}"
        rate = self._rates.get(piece.parameter, 0.0)
        return Context(step=self.passes, lr=rate, size=size, seed=zlib.crc32(mark.encode()), agreed=agreed)


def _key(piece: Piece) -> str:
    return f"{piece.name}@{piece.start}"


class Way(Protocol):
    """How one bucket becomes its sum over the members."""

    def reduce(self, flat: torch.Tensor, collective: Collective) -> None: ...


class Watch:
    """Takes the times of encoding, wire and decoding, one after another."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        took, self._last = now - self._last, now
        return took


__all__ = ["SMALL", "Bucket", "Coder", "Cost", "Piece", "Watch", "Way"]
