"""A part of a bucket as one message.

    checksum and flags   8 bytes
    lengths              4 bytes for each piece that is encoded
    pieces               the gradients of one parameter each, as the codec writes them; behind them those of all small
                         parameters as one piece
    the rest             as it is: the control block, buffers

Small parameters (biases, norms) would suffer most from a coarse codec and gain least, but as they are they can be most
of what travels. So with a coarse codec they are rounded to 8 bits by chance, which is right in the mean and leaves
nothing to keep; with a finer one they travel as they are.

A member whose gradients are not finite says so in the flags, and nothing in place of its pieces.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from paceline.codecs import Codec, PayloadError, Quantize
from paceline.strategies.reducers.coder import Bucket, Piece
from paceline.transport.arena import Collective

_HEAD = 8
_NOT_FINITE = 1
_WORTH = 64  # elements: as many bytes saved as a piece costs, several times

FOR_SMALL = Quantize(8, stochastic=True)

Encode = Callable[[Codec, Piece, torch.Tensor, torch.Tensor], int]  # a piece's values into a room; how many bytes


class Frame:
    """What of a bucket stands in a message, and where. Values are given from the part's beginning on."""

    def __init__(self, codec: Codec, bucket: Bucket, at: slice) -> None:
        self._codec = codec
        self._dtype = bucket.dtype
        self.at = at
        self.coded = [p.part(at.start, at.stop) for p in bucket.pieces if p.at.start < at.stop and at.start < p.at.stop]
        between: list[slice] = []
        last, end = at.start, min(max(bucket.end, at.start), at.stop)
        for stop, after in [*((p.at.start, p.at.stop) for p in self.coded), (end, end)]:
            if stop > last:
                between.append(slice(last - at.start, stop - at.start))
            last = max(last, after)
        tail = [slice(end - at.start, at.stop - at.start)] if at.stop > end else []
        numel = sum(s.stop - s.start for s in between)
        coarse = is_coarse(codec) and numel >= _WORTH
        self.small = between if coarse else []
        self._plain = tail if coarse else [*between, *tail]
        self._rest = (
            [Piece(f"small ones of {bucket.every[0].name} at {at.start}", slice(0, numel), 0)] if coarse else []
        )
        rest = sum(s.stop - s.start for s in self._plain) * bucket.dtype.itemsize
        self._start = _HEAD + 4 * (len(self.coded) + len(self._rest))
        sizes = [codec.nbytes(p.numel) for p in self.coded] + [FOR_SMALL.nbytes(p.numel) for p in self._rest]
        self.nbytes = padded(self._start + sum(map(padded, sizes)) + rest)
        self._message = torch.empty(0, dtype=torch.uint8)
        self._room = self._message

    def encode(self, values: torch.Tensor, says: bool, encode: Encode) -> torch.Tensor:
        """This member's message, on the CPU; it stays as it is until the next one."""
        if not self._message.numel():
            self._message = torch.empty(self.nbytes, dtype=torch.uint8)
        message, room = self._message, self._message[self._start :]
        if values.device.type != "cpu":
            if not self._room.numel():
                self._room = torch.empty(self.nbytes, dtype=torch.uint8, device=values.device)
            room = self._room
        lengths, at = message[_HEAD : self._start].view(torch.int32), 0
        for i, piece in enumerate([*self.coded, *self._rest]):
            length = 0
            if says and i < len(self.coded):
                length = encode(self._codec, piece, values[self._within(piece)].float(), room[at:])
            elif says:
                small = torch.cat([values[s] for s in self.small]).float()
                length = encode(FOR_SMALL, piece, small, room[at:])
            lengths[i] = length
            at += padded(length)
        for s in self._plain:
            size = (s.stop - s.start) * values.element_size()
            room[at : at + size].copy_(values[s].view(torch.uint8))
            at += size
        end = self._start + at
        if room is self._room:
            message[self._start : end].copy_(room[:at])
        if not self._codec.varies:  # always of one length, so that nobody has to ask for it
            message[end:].zero_()
            end = self.nbytes
        head = message[:_HEAD].view(torch.int32)
        head[1] = 0 if says else _NOT_FINITE
        head[0] = _checksum(message[4:end])
        return message[:end]

    def says(self, message: torch.Tensor, position: int) -> bool:
        """Whether its member had something to say. Refuses a message that is not as it was sent."""
        head = message[:_HEAD].view(torch.int32)
        if len(message) < self._start or int(head[0]) != _checksum(message[4:]):
            raise PayloadError(f"the message of member {position} was altered on its way: its checksum is wrong")
        return int(head[1]) != _NOT_FINITE

    def add(self, message: torch.Tensor, out: torch.Tensor, position: int) -> None:
        """Add to `out`, float32, what a message says."""
        codec, lengths = self._codec, message[_HEAD : self._start].view(torch.int32).tolist()
        says = int(message[:_HEAD].view(torch.int32)[1]) != _NOT_FINITE
        body, at = message[self._start :].to(out.device), 0
        for i, (piece, length) in enumerate(zip([*self.coded, *self._rest], lengths)):
            small = i == len(self.coded)
            most = (FOR_SMALL if small else codec).nbytes(piece.numel)
            if not 0 <= length <= most or at + length > len(body):
                raise PayloadError(f"member {position} sent {length} bytes for {piece.name!r}, which cannot be")
            if says and small:
                values = torch.zeros(piece.numel, device=out.device)
                FOR_SMALL.decode_add(body[at : at + length], values)
                for s, part in zip(self.small, torch.split(values, [s.stop - s.start for s in self.small])):
                    out[s] += part
            elif says:
                codec.decode_add(body[at : at + length], out[self._within(piece)])
            at += padded(length)
        for s in self._plain:
            size = (s.stop - s.start) * self._dtype.itemsize
            if at + size > len(body):
                raise PayloadError(f"the message of member {position} was cut short")
            out[s] += body[at : at + size].clone().view(self._dtype)
            at += size

    def spoil(self, out: torch.Tensor) -> None:
        """Some member could not say its part; the control block still adds up."""
        for s in [*map(self._within, self.coded), *self.small]:
            out[s] = torch.nan

    def _within(self, piece: Piece) -> slice:
        return slice(piece.at.start - self.at.start, piece.at.stop - self.at.start)


def is_coarse(codec: Codec) -> bool:
    """Whether it leaves much unsaid, and so sends fewer than four bits for most elements."""
    return not codec.unbiased and (codec.varies or codec.nbytes(1 << 16) < 1 << 15)


def gather(
    message: torch.Tensor, sizes: Sequence[int] | None, longest: int, collective: Collective
) -> list[torch.Tensor]:
    """Everyone's message; all are given the room of the longest. `sizes`: how long they are, None where that varies."""
    if sizes is None:
        sizes = _ask([message], longest, collective)[:, 0].tolist()
    most = padded(max(sizes))
    room = torch.empty(collective.size * most, dtype=torch.uint8)
    collective.all_gather(_to_length(message, most), room)
    return [row[:n] for row, n in zip(room.view(collective.size, -1), sizes)]


def swap(
    messages: Sequence[torch.Tensor], sizes: Sequence[int] | None, longest: int, collective: Collective
) -> list[torch.Tensor]:
    """Send each member its message; what everyone has sent to this one. `sizes`: of those, None where that varies."""
    most = longest
    if sizes is None:
        table = _ask(messages, longest, collective)
        most, sizes = padded(int(table.max())), table[:, collective.position].tolist()
    outgoing = torch.cat([_to_length(m, most) for m in messages])
    incoming = torch.empty(collective.size * most, dtype=torch.uint8)
    collective.all_to_all(outgoing, incoming)
    return [row[:n] for row, n in zip(incoming.view(collective.size, -1), sizes)]


def padded(nbytes: int) -> int:
    return -(-nbytes // 4) * 4


def _ask(messages: Sequence[torch.Tensor], longest: int, collective: Collective) -> torch.Tensor:
    """How long everyone's messages are: a row for each member."""
    sizes = torch.empty(collective.size * len(messages), dtype=torch.int64)
    collective.all_gather(torch.tensor([m.numel() for m in messages]), sizes)
    if int(sizes.min()) < _HEAD or int(sizes.max()) > longest:
        raise PayloadError(
            f"a message of {int(sizes.max())} bytes came for a bucket whose messages have at most {longest}"
        )
    return sizes.view(collective.size, -1)


def _to_length(message: torch.Tensor, nbytes: int) -> torch.Tensor:
    if message.numel() == nbytes:
        return message
    longer = torch.zeros(nbytes, dtype=torch.uint8)
    longer[: message.numel()] = message
    return longer


def _checksum(data: torch.Tensor) -> int:
    value = zlib.crc32(data.numpy().data)
    return value - (1 << 32) if value >= 1 << 31 else value
