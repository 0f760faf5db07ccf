"""A codec at work on the gradients of one model: what is encoded, what earlier steps left unsaid, and what it took.

A bucket becomes one message per member:

    checksum and flags   8 bytes
    lengths              4 bytes for each piece that is encoded
    pieces               the gradients of one parameter each, as the codec writes them
    the rest             as it is: small parameters, the control block, buffers

Everyone gets everyone's message and adds them up in the order of the members, so all end with the same bits. Codes that
add (`codec.adds_as`) are summed on their way instead, and the rest is summed beside them.

Where a gradient is not finite, its member's message says so and everyone's gradients of that bucket become nan: a
GradScaler skips the step on all members, and `check_finite` names the parameter. What was said in that pass counts for
nothing then, so every member gives it back to its residuals.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.codecs import Codec, Context, PayloadError
from paceline.codecs.codec import largest_magnitude
from paceline.core.errors import ConfigError
from paceline.transport.arena import Collective, Reduce
from paceline.transport.group import Group

_SMALL = 1024  # elements: fewer travel as they are
_HEAD = 8
_NOT_FINITE = 1


@dataclass
class Cost:
    """What the codec took and gave, since the run began."""

    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass
class Piece:
    """The gradient of one parameter in its bucket."""

    name: str
    at: slice  # of the bucket
    parameter: int  # its id

    @property
    def numel(self) -> int:
        return int(self.at.stop - self.at.start)


@dataclass
class Plan:
    """What of a bucket is encoded and what travels as it is."""

    coded: list[Piece]
    plain: list[slice]
    nbytes: int = 0
    codes: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class Coder:
    """The codec of a strategy, with the residuals of one model by parameter name."""

    def __init__(self, codec: Codec, *, feedback: bool | None, warmup: int, seed: int, group: Group) -> None:
        self.codec = codec
        self.feedback = (not codec.unbiased) if feedback is None else feedback
        self.warmup = warmup
        self.cost = Cost()
        self.passes = 0  # backward passes so far
        self.residuals: dict[str, torch.Tensor] = {}
        self._rates: dict[int, float] = {}  # learning rates of this pass, by id of the parameter
        self._rate_of: dict[str, float] = {}  # at which a residual was left
        self._said: list[tuple[str, torch.Tensor]] = []  # this pass's payloads, by name of the parameter
        self.spoilt = False  # some member's gradient of this pass is not finite
        self._seed = seed
        told = [words.decode() for words in group.exchange(f"{codec.words}, feedback={self.feedback}".encode())]
        for rank, words in enumerate(told):
            if words != told[0]:
                raise ConfigError(f"member 0 encodes with {told[0]} and member {rank} with {words}: give all the same")

    def begin(self, rates: dict[int, float]) -> None:
        """A backward pass begins, with these learning rates."""
        self.passes += 1
        self._rates = rates
        self._said.clear()
        self.spoilt = False

    def end(self) -> None:
        """The pass has ended: what was said in one that does not count is unsaid again."""
        if self.spoilt and self.feedback:
            for name, payload in self._said:
                self.codec.decode_add(payload, self.residuals[name])
        self._said.clear()

    # ---- state: this member's own

    def state(self) -> dict[str, Any]:
        return {"residuals": self.residuals, "rates": self._rate_of}

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over what one or several members left unsaid."""
        self.residuals.clear()
        for state in states:
            for name, residual in state["residuals"].items():
                if name in self.residuals:
                    self.residuals[name] += residual
                else:
                    self.residuals[name] = residual.clone()
            self._rate_of |= state["rates"]

    # ---- one piece

    def encode(self, piece: Piece, x: torch.Tensor, out: torch.Tensor, size: int, position: int) -> int:
        residual = self._residual(piece) if self.feedback else None
        seed = zlib.crc32(f"{self._seed}.{position}.{self.passes}.{piece.name}".encode())
        context = Context(step=self.passes, lr=self._rates.get(piece.parameter, 0.0), size=size, seed=seed)
        n = self.codec.encode_into(x, residual, out, context)
        self._said.append((piece.name, out[:n]))
        return n

    def _residual(self, piece: Piece) -> torch.Tensor:
        """In units of today's gradients: at half the rate, what was left at the old rate weighs twice."""
        residual = self.residuals.get(piece.name)
        if residual is None or residual.numel() != piece.numel:
            residual = self.residuals[piece.name] = torch.zeros(piece.numel)
        now, then = self._rates.get(piece.parameter, 0.0), self._rate_of.get(piece.name, 0.0)
        if now > 0:
            if then > 0 and now != then:
                residual.mul_(then / now)
            self._rate_of[piece.name] = now
        return residual


class Reducer:
    """The buckets of one arena, by where they lie in it, and how they are summed."""

    def __init__(self, coder: Coder) -> None:
        self._coder = coder
        self._plans: dict[int, Plan] = {}

    def add(self, offset: int, dtype: torch.dtype, numel: int, pieces: Sequence[Piece]) -> None:
        """A bucket of `numel` elements that begins at byte `offset` of the arena."""
        codec = self._coder.codec
        chosen = [p for p in pieces if p.numel >= _SMALL and dtype in (torch.float32, torch.bfloat16, torch.float16)]
        plain, at = [], 0
        for piece in [*chosen, None]:
            stop = piece.at.start if piece else numel
            if stop > at:
                plain.append(slice(at, stop))
            at = piece.at.stop if piece else numel
        rest = sum(s.stop - s.start for s in plain) * dtype.itemsize
        longest = _HEAD + sum(4 + _padded(codec.nbytes(p.numel)) for p in chosen) + rest
        self._plans[offset] = Plan(chosen, plain, _padded(longest))

    def through(self, collective: Collective) -> Reduce:
        """How the arena's slices are summed."""

        def reduce(flat: torch.Tensor) -> None:
            coder = self._coder
            plan = self._plans[int(flat.storage_offset()) * flat.element_size()]
            coder.cost.bytes_before += flat.nbytes
            if not plan.coded or coder.passes <= coder.warmup:
                coder.cost.bytes_after += flat.nbytes
                collective.all_reduce(flat)
            elif dtype := coder.codec.adds_as:
                self._sum(plan, flat, collective, dtype)
            else:
                self._gather(plan, flat, collective)

        return reduce

    def _sum(self, plan: Plan, flat: torch.Tensor, collective: Collective, dtype: torch.dtype) -> None:
        coder, began = self._coder, time.perf_counter()
        own = self._room(plan, sum(p.numel for p in plan.coded) * dtype.itemsize).view(dtype)
        places, at = [], 0
        for piece in plan.coded:
            places.append(slice(at, at + piece.numel))
            at += piece.numel
        if self._finite(plan, flat):
            for piece, place in zip(plan.coded, places):
                x, room = flat[piece.at].float(), own[place].view(torch.uint8)
                coder.encode(piece, x, room, collective.size, collective.position)
        else:
            own.fill_(torch.nan)
        codes = own.clone()  # this member's own stays, should it have to be given back
        encoded = time.perf_counter()
        collective.all_reduce(codes)
        rest = torch.cat([flat[s] for s in plan.plain]) if plan.plain else flat[:0]
        collective.all_reduce(rest)
        carried = time.perf_counter()
        coder.spoilt = coder.spoilt or not math.isfinite(largest_magnitude(codes))
        for piece, place in zip(plan.coded, places):
            flat[piece.at] = codes[place].to(flat.dtype)
        for s, values in zip(plan.plain, torch.split(rest, [s.stop - s.start for s in plan.plain])):
            flat[s] = values
        self._count(began, encoded, carried, codes.nbytes + rest.nbytes)

    def _gather(self, plan: Plan, flat: torch.Tensor, collective: Collective) -> None:
        began = time.perf_counter()
        message = self._encode(plan, flat, collective)
        encoded = time.perf_counter()
        messages = self._carry(plan, message, collective)
        carried = time.perf_counter()
        self._decode(plan, flat, messages)
        self._count(began, encoded, carried, message.numel())

    def _count(self, began: float, encoded: float, carried: float, nbytes: int) -> None:
        cost = self._coder.cost
        cost.encode_s += encoded - began
        cost.wire_s += carried - encoded
        cost.decode_s += time.perf_counter() - carried
        cost.bytes_after += nbytes

    def _encode(self, plan: Plan, flat: torch.Tensor, collective: Collective) -> torch.Tensor:
        """This member's message."""
        coder = self._coder
        message, at = self._room(plan, plan.nbytes), _HEAD + 4 * len(plan.coded)
        lengths = message[_HEAD:at].view(torch.int32)
        finite = self._finite(plan, flat)
        for i, piece in enumerate(plan.coded):
            length = 0
            if finite:
                x = flat[piece.at].float()
                length = coder.encode(piece, x, message[at:], collective.size, collective.position)
            lengths[i] = length
            at += _padded(length)
        for s in plan.plain:
            size = (s.stop - s.start) * flat.element_size()
            message[at : at + size].copy_(flat[s].view(torch.uint8))
            at += size
        if not coder.codec.varies:  # always of one length, so that nobody has to ask for it
            message[at : plan.nbytes].zero_()
            at = plan.nbytes
        head = message[:_HEAD].view(torch.int32)
        head[1] = 0 if finite else _NOT_FINITE
        head[0] = _checksum(message[4:at])
        return message[:at]

    def _carry(self, plan: Plan, message: torch.Tensor, collective: Collective) -> list[torch.Tensor]:
        """Everyone's message; all are given the room of the longest."""
        if not self._coder.codec.varies:
            room = torch.empty(collective.size * plan.nbytes, dtype=torch.uint8)
            collective.all_gather(message, room)
            return list(room.view(collective.size, -1))
        sizes = torch.empty(collective.size, dtype=torch.int64)
        collective.all_gather(torch.tensor([message.numel()]), sizes)
        longest = int(sizes.max())
        if not _HEAD <= longest <= plan.nbytes or int(sizes.min()) < _HEAD:
            raise PayloadError(
                f"a message of {longest} bytes came for a bucket whose messages have at most {plan.nbytes}"
            )
        longest = _padded(longest)
        room = torch.empty(collective.size * longest, dtype=torch.uint8)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: message.numel()] = message
        collective.all_gather(mine, room)
        return [row[:n] for row, n in zip(room.view(collective.size, -1), sizes.tolist())]

    def _decode(self, plan: Plan, flat: torch.Tensor, messages: list[torch.Tensor]) -> None:
        """Make the bucket the sum of what the messages say."""
        spoilt = False
        for position, message in enumerate(messages):
            head = message[:_HEAD].view(torch.int32)
            if int(head[0]) != _checksum(message[4:]):
                raise PayloadError(f"the message of member {position} was altered on its way: its checksum is wrong")
            spoilt = spoilt or int(head[1]) == _NOT_FINITE
        out = flat.zero_() if flat.dtype == torch.float32 else torch.zeros(flat.numel())
        for position, message in enumerate(messages):
            self._add(plan, out, message, position, flat.dtype)
        if spoilt:  # the control block still adds up
            self._coder.spoilt = True
            for piece in plan.coded:
                out[piece.at] = torch.nan
        if out is not flat:
            flat.copy_(out)

    def _add(self, plan: Plan, out: torch.Tensor, message: torch.Tensor, position: int, dtype: torch.dtype) -> None:
        codec, at = self._coder.codec, _HEAD + 4 * len(plan.coded)
        lengths = message[_HEAD:at].view(torch.int32).tolist() if len(message) >= at else [-1] * len(plan.coded)
        says = int(message[:_HEAD].view(torch.int32)[1]) != _NOT_FINITE
        for piece, length in zip(plan.coded, lengths):
            if not 0 <= length <= codec.nbytes(piece.numel) or at + length > len(message):
                raise PayloadError(f"member {position} sent {length} bytes for {piece.name!r}, which cannot be")
            if says:
                codec.decode_add(message[at : at + length], out[piece.at])
            at += _padded(length)
        for s in plan.plain:
            size = (s.stop - s.start) * dtype.itemsize
            if at + size > len(message):
                raise PayloadError(f"the message of member {position} was cut short")
            out[s] += message[at : at + size].clone().view(dtype)
            at += size

    def _finite(self, plan: Plan, flat: torch.Tensor) -> bool:
        """Whether all that is to be encoded is. Asked first, so that no part of a bucket is said without the others;
        buffers may hold what they like."""
        return all(math.isfinite(largest_magnitude(flat[piece.at])) for piece in plan.coded)

    def _room(self, plan: Plan, nbytes: int) -> torch.Tensor:
        """Where this member's codes stay until the next pass."""
        if plan.codes.numel() < nbytes:
            plan.codes = torch.empty(nbytes, dtype=torch.uint8)
        return plan.codes[:nbytes]


def _checksum(data: torch.Tensor) -> int:
    value = zlib.crc32(data.numpy().data)
    return value - (1 << 32) if value >= 1 << 31 else value


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4) * 4
