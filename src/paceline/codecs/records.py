"""Records: the elements that travel, with where they stand. What Top-k, Threshold and NonZero share.

    Records           where each record of a payload begins; writes and reads them in plain torch
    count_above       how many elements of each block reach a cut, and the largest magnitude; then
    write_above       their records, and the residual becomes what these do not say
    add_records       checks all records of a payload, then adds what they say
    write_counts, read_header, read_counts
                      before the records, where their number depends on the values: how many, in all and of each block

kernels/sparse.py has the layout of a record; it and kernels/reading.py have the fused forms of all this.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch

from paceline.codecs.codec import Codec, Context, PayloadError, check_length, largest_magnitude
from paceline.codecs.kernels.spread import compiled, spread
from paceline.core.errors import ConfigError, nearest
from paceline.core.words import finite

Array = np.ndarray[Any, Any]

VALUES = {"float32": 32, "bf16": 16, "fp16": 16, "int8": 8, "2bit": 2}  # bits; kernels know them by their order
BLOCK = 4096  # elements of a block where a whole tensor is looked at
HEADER_BYTES = 8
SCALE_BYTES = {"int8": 4, "2bit": 4}  # of a record; the others have none
_HALVES = {"bf16": (torch.bfloat16, 3.3895313892515355e38), "fp16": (torch.float16, 65504.0)}
_NONE = np.empty(0, np.float32)
PLAIN = (np.float32(1.0), np.float32(0.0))  # the factor and the momentum of kernels that are given none
_MAGNITUDE = 0x7FFFFFFF


def fused(x: torch.Tensor) -> bool:
    """Whether the compiled kernels take this tensor."""
    return compiled() and x.device.type == "cpu"


def check_values(values: str, name: str) -> None:
    if not isinstance(values, str) or values not in VALUES:
        raise ConfigError(f"{name}(values={values!r}): {nearest(str(values), VALUES)}")


def check_density(density: float, name: str) -> None:
    if not finite(density) or not 0 < density <= 1:
        raise ConfigError(f"{name}(density={density!r}): the share of elements that travels is above 0 and at most 1")


def share(density: float, numel: int) -> int:
    """How many of so many elements: rounded up, but not for the last bits of a product.

    >>> share(0.07, 100), share(0.01, 4096), share(0.01, 3), share(0.01, 0)
    (7, 41, 1, 0)
    """
    return min(numel, math.ceil(density * numel * (1 - 1e-12)))


class Records:
    """Where the records of a payload stand: `counts[b]` elements of each block b, the first record at `start`."""

    def __init__(self, numel: int, block: int, values: str, counts: Array, start: int) -> None:
        self.numel, self.block, self.values, self.counts = numel, block, values, counts
        self.kind = list(VALUES).index(values)
        self.scale_bytes = SCALE_BYTES.get(values, 0)
        room = np.full(len(counts), block, np.int64)
        if numel % block:
            room[-1] = numel % block
        self.lows = low_bits(room, counts)
        self.highs = (room - 1) >> self.lows
        self.index_bytes = index_bytes(room, counts)
        sizes = self.index_bytes + (counts * VALUES[values] + 7) // 8 + self.scale_bytes * (counts > 0)
        ends = np.cumsum(sizes) + start
        self.start, self.offsets = start, ends - sizes
        self.end = int(ends[-1]) if len(ends) else start

    def write(self, whole: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the records of these (ascending) positions in plain torch; what a reader takes the values for."""
        block_of, rank, low, first = self._places(out.device)
        inside, values = positions - block_of * self.block, whole[positions]
        bits = torch.zeros(8 * (self.end - self.start), dtype=torch.uint8, device=out.device)
        begin = 8 * (first + self.scale_bytes - self.start)
        for j in range(int(self.lows.max(initial=0))):
            wide = low > j
            bits[(begin + rank * low + j)[wide]] = (inside >> j & 1)[wide].to(torch.uint8)
        counts, highs = (torch.from_numpy(a).to(out.device)[block_of] for a in (self.counts, self.highs))
        bits[(begin + counts * low + (inside >> low) + rank)[highs > 0]] = 1
        if self.values == "2bit":
            scale, codes, said = self._two_bits(values, block_of, rank)
            place = 8 * (self._value_bytes(block_of, first) - self.start) + 2 * rank
            bits[place], bits[place + 1] = codes & 1, codes >> 1
        powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=out.device)
        out[self.start : self.end] = (bits.view(-1, 8) * powers).sum(1, dtype=torch.uint8)
        head = first[:, None] + torch.arange(4, device=out.device)
        if self.values == "2bit":
            out[head] = scale[block_of]
            return said
        if self.values == "int8":
            scale = torch.zeros(len(self.counts), device=out.device)
            scale.scatter_reduce_(0, block_of, values.abs(), "amax")
            scale = scale.clamp(2.0**-100, 3.4e38)
            scale = scale / torch.full_like(scale, 127.0)  # by a tensor: some devices turn a number upside down
            codes = torch.round(values / scale[block_of]).clamp(-127, 127)
            said, coded = codes * scale[block_of], codes.to(torch.int8)
            out[head] = scale.view(torch.uint8).view(-1, 4)[block_of]
        elif self.values == "float32":
            said = coded = values
        else:
            dtype, most = _HALVES[self.values]
            coded = values.clamp(-most, most).to(dtype)
            said = coded.float()
        out[self._value_places(block_of, rank, first)] = coded.view(torch.uint8).view(-1, VALUES[self.values] // 8)
        return said

    def _two_bits(
        self, values: torch.Tensor, block_of: torch.Tensor, rank: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The two magnitudes of each record as four bytes, the codes, and what a reader takes the values for."""
        magnitudes = values.abs()
        middle = self._means(magnitudes, torch.ones_like(magnitudes), block_of, rank).float()
        upper = magnitudes >= middle[block_of]
        means = [self._means(magnitudes, chosen, block_of, rank) for chosen in (~upper, upper)]
        words = torch.stack(means, 1).float().view(torch.int32) >> 16  # cut off: no more than was meant
        said = (words.view(-1)[2 * block_of + upper] << 16).view(torch.float32)
        negative = values.view(torch.int32) < 0
        codes = upper.to(torch.uint8) | negative.to(torch.uint8) << 1
        return words.to(torch.int16).view(torch.uint8).view(-1, 4), codes, torch.where(negative, -said, said)

    def _means(
        self, magnitudes: torch.Tensor, chosen: torch.Tensor, block_of: torch.Tensor, rank: torch.Tensor
    ) -> torch.Tensor:
        """Of the chosen of each record, 0 where there are none; halves added to halves, as the kernel does."""
        width = 1 << (int(self.counts.max(initial=1)) - 1).bit_length()
        terms = torch.zeros(2, len(self.counts), width, dtype=torch.float64, device=magnitudes.device)
        terms[0, block_of, rank] = (magnitudes * chosen).double()
        terms[1, block_of, rank] = chosen.double()
        while width > 1:
            width //= 2
            terms = terms[:, :, :width] + terms[:, :, width:]
        return terms[0, :, 0] / terms[1, :, 0].clamp(min=1)

    def read(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Positions and values in plain torch; nothing where they are not sensible."""
        block_of, rank, low, first = self._places(payload.device)
        high = self._read_high(payload)
        if high is None:
            return None
        inside = high << low
        for j in range(int(self.lows.max(initial=0))):
            place = 8 * (first + self.scale_bytes) + rank * low + j
            bit = payload[(place >> 3).clamp(max=payload.numel() - 1)].long() >> (place & 7) & 1
            inside |= torch.where(low > j, bit << j, 0)
        positions = inside + block_of * self.block
        if positions.numel() and (int(positions[-1]) >= self.numel or bool((positions.diff() <= 0).any())):
            return None
        head = first[:, None] + torch.arange(4, device=payload.device)
        if self.values == "2bit":
            codes = payload[self._value_bytes(block_of, first) + (rank >> 2)].int() >> (2 * (rank & 3)).int() & 3
            words = payload[head].view(-1).view(torch.int16).view(-1, 2).int() << 16
            values = words.gather(1, (codes & 1).long()[:, None]).view(-1).view(torch.float32)
            values = torch.where(codes > 1, -values, values)
            return (positions, values) if bool(torch.isfinite(values).all()) else None
        coded = payload[self._value_places(block_of, rank, first)].contiguous().view(-1)
        if self.values == "int8":
            values = coded.view(torch.int8).float() * payload[head].view(-1).view(torch.float32)
        elif self.values == "float32":
            values = coded.view(torch.float32)
        else:
            values = coded.view(_HALVES[self.values][0]).float()
        return (positions, values) if bool(torch.isfinite(values).all()) else None

    def _read_high(self, payload: torch.Tensor) -> torch.Tensor | None:
        """The high parts of all positions; nothing where a block has another number of them than elements."""
        lengths = np.where(self.highs > 0, self.counts + self.highs, 0) * (self.counts > 0)
        block_of = np.repeat(np.arange(len(lengths)), lengths)
        inside = np.arange(len(block_of)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        begin = 8 * (self.offsets + self.scale_bytes) + self.counts * self.lows
        place = torch.from_numpy(begin[block_of] + inside).to(payload.device)
        ones = ((payload[place >> 3] >> (place & 7).to(torch.uint8)) & 1).nonzero().view(-1).cpu().numpy()
        found = np.bincount(block_of[ones], minlength=len(lengths))
        if (found != np.where(lengths > 0, self.counts, 0)).any():
            return None
        rank = np.arange(len(ones)) - np.repeat(np.cumsum(found) - found, found)
        high = np.zeros(int(self.counts.sum()), np.int64)
        high[np.repeat(lengths > 0, self.counts)] = inside[ones] - rank
        return torch.from_numpy(high).to(payload.device)

    def _places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each element: its block, its place among those of its block, low bits of a position, its record."""
        block_of = np.repeat(np.arange(len(self.counts)), self.counts)
        rank = np.arange(len(block_of)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        block, place, low, first = (
            torch.from_numpy(a).to(device) for a in (block_of, rank, self.lows[block_of], self.offsets[block_of])
        )
        return block, place, low, first

    def _value_bytes(self, block_of: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Where the values of an element's record begin."""
        return first + self.scale_bytes + torch.from_numpy(self.index_bytes).to(first.device)[block_of]

    def _value_places(self, block_of: torch.Tensor, rank: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        size = VALUES[self.values] // 8
        return (self._value_bytes(block_of, first) + rank * size)[:, None] + torch.arange(size, device=first.device)


def low_bits(room: Array, counts: Array) -> Array:
    """How many bits of each position travel as they are; all of them where high parts would not save anything.

    >>> low_bits(np.array([4096, 4096, 4096]), np.array([1, 64, 512]))
    array([12,  6,  3])
    """
    every = np.frexp((room - 1).astype(np.float64))[1].astype(np.int64)
    lows = np.frexp((room // np.maximum(counts, 1)).astype(np.float64))[1].astype(np.int64) - 1
    return np.where(_index_bits(room, counts, lows) < counts * every, lows, every)


def index_bytes(room: Array, counts: Array) -> Array:
    """Of the positions of so many elements of a block, one of `room` elements each.

    >>> index_bytes(np.array([4096, 4096, 4096]), np.array([1, 64, 512]))
    array([  2,  64, 320])
    """
    return (_index_bits(room, counts, low_bits(room, counts)) + 7) // 8


def _index_bits(room: Array, counts: Array, lows: Array) -> Array:
    highs = (room - 1) >> lows
    bits: Array = counts * lows + np.where((highs > 0) & (counts > 0), counts + highs, 0)
    return bits


def largest_of_sum(x: torch.Tensor, residual: torch.Tensor | None) -> float:
    """The largest magnitude of x + residual; nan where there is one."""
    assert residual is None or residual.numel() == x.numel(), "kernels do not look where a tensor ends"
    if x.numel() and fused(x):
        from paceline.codecs.kernels import sparse

        return magnitude_of(max(spread(sparse.largest, x.numel(), x.numpy(), array_of(residual), *PLAIN)))
    return largest_magnitude(x if residual is None else x + residual)


def count_above(x: torch.Tensor, residual: torch.Tensor | None, cut: int) -> tuple[Array, float]:
    """How many of each block have magnitudes of at least `cut` (the bits of a float), and the largest magnitude.

    A cut of 0 stands for all that is not +0.0, bit for bit.
    """
    num_blocks = -(-x.numel() // BLOCK)
    if fused(x):
        from paceline.codecs.kernels import sparse

        counts = np.zeros(num_blocks, np.int64)
        tops = spread(sparse.count_above, x.numel(), x.numpy(), array_of(residual), cut, BLOCK, counts, unit=BLOCK)
        return counts, magnitude_of(max(tops)) if x.numel() else 0.0
    whole = x if residual is None else x + residual
    blocks = torch.zeros(num_blocks * BLOCK, dtype=torch.bool, device=x.device)
    blocks[: x.numel()] = _above(whole, cut)
    return blocks.view(-1, BLOCK).sum(1).cpu().numpy(), largest_magnitude(whole)


def write_above(x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, records: Records, cut: int) -> None:
    """Write records of what `count_above` counted, in each block the first as many as the records have room for."""
    if fused(x):
        from paceline.codecs.kernels import sparse

        place = (BLOCK, records.counts, records.lows, records.offsets, records.kind, cut)
        spread(sparse.encode_above, x.numel(), x.numpy(), array_of(residual), out.numpy(), *place, unit=BLOCK)
        return
    whole = x if residual is None else x + residual
    positions = _above(whole, cut).nonzero().view(-1)[: int(records.counts.sum())]
    keep_unsaid(whole, positions, records.write(whole, positions, out), residual)


def add_records(payload: torch.Tensor, out: torch.Tensor, weight: float, records: Records, codec: Codec) -> None:
    """Check all records, then add what they say to `out`."""
    if fused(out):
        from paceline.codecs.kernels import reading

        layout = (records.block, records.counts, records.lows, records.offsets, records.kind)
        args = (payload.numpy(), out.numpy(), *layout, np.float32(weight))
        if all(spread(reading.read_records, out.numel(), *args, False, unit=records.block)):
            spread(reading.read_records, out.numel(), *args, True, unit=records.block)
            return
    elif (found := records.read(payload)) is not None:
        positions, values = found
        out[positions] += values * weight
        return
    raise PayloadError(f"a payload of {codec.words} has positions or values that cannot be")


def sampled_cut(x: torch.Tensor, residual: torch.Tensor | None, density: float, context: Context) -> int:
    """The magnitude (as bits, at least 1) that about this share of the elements reaches, from a sample of them.

    The sample is taken in runs of 16, one from each of many equal parts of the tensor: cheap to read, and even.
    256 or more of it are above the cut, where the tensor has as many; short tensors are looked at whole.
    """
    run = 16
    num_runs = -(-int(min(max(256 / density, 1 << 14), 1 << 20)) // run)
    if x.numel() > 2 * run * num_runs:
        part = x.numel() // num_runs
        word = torch.arange(num_runs, device=x.device) * 0x9E3779B1 + (context.seed * 0x85EBCA6B + context.step) % 2**32
        word &= 0xFFFFFFFF
        for factor in (0x85EBCA6B, 0xC2B2AE35):  # the finaliser of murmur3
            word = ((word ^ word >> 16) * factor) & 0xFFFFFFFF
        first = torch.arange(num_runs, device=x.device) * part + (word ^ word >> 16) % (part - run + 1)
        sample = (first[:, None] + torch.arange(run, device=x.device)).view(-1)
        x, residual = x[sample], None if residual is None else residual[sample]
    magnitudes = magnitude_bits(x if residual is None else x + residual)
    if not len(magnitudes):
        return 1
    return max(int(magnitudes.topk(share(density, len(magnitudes)), sorted=False).values.min()), 1)


def write_counts(records: Records, flag: int, out: torch.Tensor) -> None:
    """The header (a flag and how many elements travel), and how many of each block."""
    head = struct.pack("<q", flag << 56 | int(records.counts.sum())) + records.counts.astype("<u2").tobytes()
    out[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)


def read_header(payload: torch.Tensor, codec: Codec) -> tuple[int, int]:
    """The flag and how many elements travel."""
    if payload.numel() < HEADER_BYTES:
        raise PayloadError(f"a payload of {codec.words} has {payload.numel()} bytes and no whole header")
    (word,) = struct.unpack("<Q", bytes(payload[:HEADER_BYTES].tolist()))
    return word >> 56, word & ((1 << 56) - 1)


def read_counts(payload: torch.Tensor, numel: int, values: str, count: int, codec: Codec) -> Records:
    """Where the records stand, from a payload that is checked but for the records themselves."""
    num_blocks = -(-numel // BLOCK)
    start = HEADER_BYTES + 2 * num_blocks
    if payload.numel() < start:
        raise PayloadError(f"a payload of {codec.words} has {payload.numel()} bytes where at least {start} belong")
    counts = payload[HEADER_BYTES:start].cpu().numpy().copy().view("<u2").astype(np.int64)
    room = np.minimum(numel - np.arange(num_blocks) * BLOCK, BLOCK)
    if (counts > room).any() or int(counts.sum()) != count:
        raise PayloadError(f"a payload of {codec.words} has counts that do not fit {numel} elements")
    records = Records(numel, BLOCK, values, counts, start)
    check_length(payload, records.end, codec)
    return records


def array_of(residual: torch.Tensor | None) -> Array:
    """What kernels take for a residual: an empty one where there is none."""
    return _NONE if residual is None else residual.numpy()


def magnitude_bits(whole: torch.Tensor) -> torch.Tensor:
    """The bits of all magnitudes, which are ordered as the magnitudes are."""
    return whole.view(torch.int32) & _MAGNITUDE


def _above(whole: torch.Tensor, cut: int) -> torch.Tensor:
    return magnitude_bits(whole) >= cut if cut else whole.view(torch.int32) != 0


def keep_unsaid(
    whole: torch.Tensor, positions: torch.Tensor, said: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """The residual becomes what is not said."""
    if residual is not None:
        kept = whole[positions] - said
        residual.copy_(whole)
        residual[positions] = kept


def magnitude_of(bits: int) -> float:
    """The magnitude that has these bits.

    >>> magnitude_of(0x3F800000)
    1.0
    """
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
