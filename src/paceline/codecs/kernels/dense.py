"""Blocks of a flat tensor as one scale each and packed codes: what Sign, Quantize and Ternary share.

A payload is the float32 scales of all blocks, then the codes. A block of n elements has codes of w = ceil(n · bits / 8)
bytes; byte j holds the elements j, j + w, j + 2w, …, the first in its lowest bits. So neighbours in memory are
neighbours in a vector register, and packing is a shift and an or. Only the last block may be short.

Encoding reads the tensor twice: `Blocks.largest…` finds the largest magnitude of each block, and perhaps a mean; the
codec makes scales of them and refuses what is not finite; `Blocks.write_…` packs the codes and updates the residual.
What stands between the two is small and the same numpy code for both forms, so bytes agree where measures and codes do.
(Not torch: its threads keep their cores busy for some milliseconds after each small task, which the kernels then lack.)

    largest   a maximum has no order. Kernels compare the bits of magnitudes as integers: that keeps vectors full
              (a maximum of floats that heeds nan does not), and nan and inf come out on top
    sums      float64, halves added to halves until one number is left: |p| of a block cannot overflow, and every form
              adds in the same order
    codes     one multiplication, one rounding, one multiplication, one subtraction, each in float32

Here are the torch forms of all this, and the choice between them and the kernels of packing.py. On CUDA devices the
kernels of triton_dense.py do all of it at once, scales included: a codec asks `on_cuda` first, and gives them a `Plan`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.codecs.codec import Codec, Context, PayloadError, check_length
from paceline.codecs.kernels.random import draws, keys
from paceline.codecs.kernels.spread import compiled, spread
from paceline.core.errors import ConfigError

Singles = npt.NDArray[np.float32]  # scales and the like, one for each block
Doubles = npt.NDArray[np.float64]

LARGEST = 3.4e38  # of a scale times its highest code: a little below what float32 holds, so no rounding gives inf
SMALLEST = 2.0**-100  # a block whose magnitudes are all below becomes zeros: the inverse of its scale might overflow


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the kernels for CUDA devices need to know of a codec."""

    codec: Codec
    block: int
    bits: int  # 1: signs, whose scale is the mean magnitude
    clip: float = 0.0  # in units of a block's root mean square; 0: the scale is the largest magnitude
    drawn: bool = False
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        from paceline.codecs.kernels import triton_dense

        return triton_dense.encode(self, x, residual, out, context)

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        from paceline.codecs.kernels import triton_dense

        triton_dense.decode_add(self, payload, out, weight)


def on_cuda(tensor: torch.Tensor) -> bool:
    """Whether the kernels for CUDA devices take this tensor."""
    return tensor.is_cuda and _has_triton(tensor.device)


@functools.cache
def _has_triton(device: torch.device) -> bool:
    if os.environ.get("PACELINE_KERNELS") == "torch" or importlib.util.find_spec("triton") is None:
        return False
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from paceline.codecs.kernels import triton_dense

        triton_dense.try_out(device)
    except Exception as error:  # such as no compiler: Triton wants one for the code that launches a kernel
        warnings.warn(f"codecs take their slower torch form on {device}: Triton fails with {error}", stacklevel=2)
        return False
    return True


def check_block(block: int, name: str) -> int:
    """Refuse a size of blocks that cannot be halved and packed."""
    if not isinstance(block, int) or block & (block - 1) or not 16 <= block <= 65536:
        raise ConfigError(f"{name}(block={block!r}): a power of two from 16 to 65536 is needed, such as 256")
    return block


def num_blocks(numel: int, block: int) -> int:
    return -(-numel // block)


def nbytes(numel: int, block: int, bits: int) -> int:
    return 4 * num_blocks(numel, block) + -(-numel * bits // 8)


def read_scales(payload: torch.Tensor, numel: int, block: int, bits: int, codec: Codec) -> Singles:
    """The scales of a payload, after all has been checked that can be wrong with it."""
    check_length(payload, nbytes(numel, block, bits), codec)
    scales: Singles = payload[: 4 * num_blocks(numel, block)].cpu().numpy().copy().view(np.float32)
    if scales.size and not (scales.min() >= 0.0 and scales.max() < np.inf):  # a nan makes both false
        raise PayloadError(f"a payload of {codec.words} has a scale that is negative or not finite")
    return scales


def levels_of(bits: int) -> int:
    """The highest code of so many bits; the lowest is as far from zero."""
    return (1 << (bits - 1)) - 1


def scales_of(largest: Singles, levels: int) -> tuple[Singles, Singles]:
    """The scales by which each largest magnitude has the highest code, and their inverses; zeros where it is tiny."""
    highest = np.float32(levels)
    live = largest >= np.float32(SMALLEST)
    limited: Singles = np.where(live, np.minimum(largest, np.float32(LARGEST)), highest)
    scales: Singles = limited / highest * live
    inverses: Singles = highest / limited * live
    return scales, inverses


class Blocks:
    """A tensor and what its residual adds, cut in blocks, on the way to a payload."""

    def __init__(self, x: torch.Tensor, residual: torch.Tensor | None, block: int) -> None:
        assert x.dtype == torch.float32
        assert residual is None or residual.shape == x.shape
        self.x, self.residual, self.block = x, residual, block
        self.fused = compiled() and x.device.type == "cpu"

    @functools.cached_property
    def whole(self) -> torch.Tensor:  # the torch path's only: kernels add as they go
        return self.x if self.residual is None else self.x + self.residual

    @property
    def _arrays(self) -> tuple[Any, Any, bool]:
        x = self.x.numpy()
        return (x, np.empty(0, np.float32), False) if self.residual is None else (x, self.residual.numpy(), True)

    def largest(self) -> Singles:
        """The largest magnitude of each block; nan or inf where an element is."""
        largest = np.empty(num_blocks(self.x.numel(), self.block), np.float32)
        if self.fused:
            from paceline.codecs.kernels import packing

            args = (*self._arrays, self.block, largest.view(np.int32))
            spread(packing.find_largest, self.x.numel(), *args, unit=self.block)
        else:
            for of_blocks, _, rows in _rows(self.whole, self.block):
                largest[of_blocks] = rows.abs().amax(1).cpu().numpy()
        return largest

    def largest_and_mean(self, power: int) -> tuple[Singles, Doubles]:
        """The same, and the mean of |p| or, with a power of 2, of its square."""
        num, short = divmod(self.x.numel(), self.block)
        largest = np.empty(num + (short > 0), np.float32)
        sums = np.empty(num + (short > 0), np.float64)
        if self.fused:
            from paceline.codecs.kernels import packing

            args = (*self._arrays, self.block, power == 2, largest.view(np.int32), sums)
            spread(packing.find_sums, self.x.numel(), *args, unit=self.block)
        else:
            largest = self.largest()
            for of_blocks, _, rows in _rows(self.whole, self.block):
                terms = rows.abs().double() if power == 1 else rows.double().square()
                sums[of_blocks] = _sum_of_halves(terms, self.block).cpu().numpy()
        sums[:num] /= self.block
        sums[num:] /= short or 1
        return largest, sums

    def write_signs(self, scales: Singles, out: torch.Tensor) -> int:
        """The payload of signs, a bit that is set being negative."""
        codes, size = self._write_scales(scales, out, 1)
        if self.fused:
            from paceline.codecs.kernels import packing

            args = (*self._arrays, self.block, scales, codes.numpy())
            spread(packing.write_signs, self.x.numel(), *args, unit=self.block)
            return size
        for of_blocks, part, rows in _rows(self.whole, self.block):
            scale = _column(scales[of_blocks], rows)
            negative = rows < 0
            codes[part.start // 8 : -(-part.stop // 8)] = _pack(negative.to(torch.uint8), 1)
            self._keep(part, rows, torch.where(negative, -scale, scale))
        return size

    def write_codes(
        self, largest: Singles, bits: int, out: torch.Tensor, context: Context | None, levels: int | None = None
    ) -> int:
        """The payload of signed codes, the largest magnitude of a block having the highest; rounded half to even, or by
        a draw, where there is a context. An element that is larger still, or no number, gets the highest code too.

        Args:
            levels: the highest code; None: of all that so many bits can be.
        """
        highest = levels or levels_of(bits)
        scales, inverses = scales_of(largest, highest)
        codes, size = self._write_scales(scales, out, bits)
        stream = keys(context.seed, context.step) if context else (0, 0)
        if self.fused:
            from paceline.codecs.kernels import packing

            drawn = (context is not None, np.uint32(stream[0]), np.uint32(stream[1]))
            args = (*self._arrays, self.block, bits, np.float32(highest), *drawn, scales, inverses, codes.numpy())
            spread(packing.write_codes, self.x.numel(), *args, unit=self.block)
            return size
        uniform = draws(stream, self.x.numel(), self.x.device) if context else None
        for of_blocks, part, rows in _rows(self.whole, self.block):
            steps = rows.abs() * _column(inverses[of_blocks], rows)
            steps = torch.where(steps < highest, steps, float(highest))
            if uniform is None:
                steps.round_()
            else:
                down = steps.trunc()
                steps = down + (uniform[part].view_as(rows) < steps - down)
            steps = torch.where(rows < 0, -steps, steps)
            codes[part.start * bits // 8 : -(-part.stop * bits // 8)] = _pack(steps.to(torch.int8), bits)
            self._keep(part, rows, steps * _column(scales[of_blocks], rows))
        return size

    def _write_scales(self, scales: Singles, out: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
        size = nbytes(self.x.numel(), self.block, bits)
        assert out.dtype == torch.uint8
        assert out.numel() >= size, "kernels do not look where a tensor ends"
        if self.fused:
            out.numpy()[: scales.nbytes] = scales.view(np.uint8)
        else:
            out[: scales.nbytes] = torch.from_numpy(scales.view(np.uint8)).to(out.device)
        return out[scales.nbytes : size], size

    def _keep(self, part: slice, rows: torch.Tensor, said: torch.Tensor) -> None:
        if self.residual is not None:
            torch.sub(rows, said, out=self.residual[part].view_as(rows))


def add_signs(codes: torch.Tensor, factors: Singles, block: int, out: torch.Tensor) -> None:
    """Add plus or minus the factor of its block to each element."""
    if compiled() and out.device.type == "cpu":
        from paceline.codecs.kernels import packing

        spread(packing.add_signs, out.numel(), codes.numpy(), factors, block, out.numpy(), unit=block)
        return
    for of_blocks, part, rows in _rows(out, block):
        factor = _column(factors[of_blocks], rows)
        negative = _unpack(codes[part.start // 8 : -(-part.stop // 8)], 1, rows.shape).bool()
        rows += torch.where(negative, -factor, factor)


def add_codes(codes: torch.Tensor, factors: Singles, block: int, bits: int, out: torch.Tensor) -> None:
    """Add its code times the factor of its block to each element."""
    if compiled() and out.device.type == "cpu":
        from paceline.codecs.kernels import packing

        spread(packing.add_codes, out.numel(), codes.numpy(), factors, block, bits, out.numpy(), unit=block)
        return
    half = 1 << (bits - 1)
    for of_blocks, part, rows in _rows(out, block):
        fields = _unpack(codes[part.start * bits // 8 : -(-part.stop * bits // 8)], bits, rows.shape)
        rows += ((fields.to(torch.int16) ^ half) - half).float() * _column(factors[of_blocks], rows)


def _rows(flat: torch.Tensor, block: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """The whole blocks as a matrix, then the short one: (which blocks, which elements, a row per block)."""
    num, short = divmod(flat.numel(), block)
    if num:
        yield slice(0, num), slice(0, num * block), flat[: num * block].view(num, block)
    if short:
        yield slice(num, num + 1), slice(num * block, flat.numel()), flat[num * block :].view(1, short)


def _column(values: Singles, rows: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(rows.device).view(-1, 1)


def _sum_of_halves(terms: torch.Tensor, block: int) -> torch.Tensor:
    width = block
    terms = torch.nn.functional.pad(terms, (0, block - terms.shape[1]))
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    return terms[:, 0]


def _pack(fields: torch.Tensor, bits: int) -> torch.Tensor:
    num, length = fields.shape
    per = 8 // bits
    width = -(-length // per)
    planes = torch.nn.functional.pad(fields.view(torch.uint8), (0, per * width - length)).view(num, per, width)
    packed = torch.zeros(num, width, dtype=torch.uint8, device=fields.device)
    for plane in range(per):
        packed |= (planes[:, plane] & ((1 << bits) - 1)) << (plane * bits)
    return packed.view(-1)


def _unpack(codes: torch.Tensor, bits: int, shape: torch.Size) -> torch.Tensor:
    bytes_of_blocks = codes.view(shape[0], -1)
    planes = [(bytes_of_blocks >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.cat(planes, 1)[:, : shape[1]]
