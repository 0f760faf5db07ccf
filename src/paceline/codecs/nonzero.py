"""NonZero: all that is not zero travels, bit for bit. For gradients that are sparse by themselves, such as embeddings'.

Whichever is shortest: positions and values (few), a bitmap and values (many), or every element (nearly all). What is
left out is +0.0 exactly; -0.0 travels.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from paceline.codecs.codec import (
    Context,
    PayloadError,
    check_decode,
    check_encode,
    check_finite,
    check_length,
    largest_magnitude,
)
from paceline.codecs.kernels.spread import spread
from paceline.codecs.records import (
    BLOCK,
    HEADER_BYTES,
    Array,
    Records,
    add_records,
    count_above,
    fused,
    read_counts,
    read_header,
    write_above,
    write_counts,
)
from paceline.codecs.threshold import DENSE, read_values, write_dense, write_header

_POSITIONS, _BITMAP = 0, 1


class NonZero:
    """The elements that are not zero, lossless."""

    unbiased = True
    adds_as = None
    varies = True
    rows = 1

    @property
    def words(self) -> str:
        return "nonzero()"

    def nbytes(self, numel: int) -> int:
        return HEADER_BYTES + 4 * numel

    def head_bytes(self, numel: int) -> int:
        return 0

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        return None

    def bound(self, x: torch.Tensor) -> float:
        return 0.0

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        check_encode(x, residual, out, self)
        counts, largest = count_above(x, residual, 0)
        check_finite(largest, self)
        records = Records(x.numel(), BLOCK, "float32", counts, HEADER_BYTES + 2 * len(counts))
        values_at = HEADER_BYTES + -(-x.numel() // 8)
        size = values_at + 4 * int(counts.sum())
        if self.nbytes(x.numel()) < min(records.end, size):
            return write_dense(x, residual, out)
        if records.end <= size:
            write_counts(records, _POSITIONS, out)
            write_above(x, residual, out, records, 0)
            return records.end
        write_header(int(counts.sum()), _BITMAP, out)
        _write_bitmap(x, residual, out[HEADER_BYTES:values_at], out[values_at:size], np.cumsum(counts) - counts)
        if residual is not None:
            residual.zero_()
        return size

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_decode(payload, out, self)
        flag, count = read_header(payload, self)
        if flag == _POSITIONS:
            add_records(payload, out, weight, read_counts(payload, out.numel(), "float32", count, self), self)
        elif (flag == DENSE and count == out.numel()) or (flag == _BITMAP and count <= out.numel()):
            values_at = HEADER_BYTES + (-(-out.numel() // 8) if flag == _BITMAP else 0)
            check_length(payload, values_at + 4 * count, self)
            values = read_values(payload[values_at:])
            if not math.isfinite(largest_magnitude(values)):
                raise PayloadError(f"a payload of {self.words} has values that are not finite")
            if flag == DENSE:
                out.add_(values, alpha=weight)
            else:
                self._add_bitmap(payload[HEADER_BYTES:values_at], values, out, weight)
        else:
            raise PayloadError(f"a payload of {self.words} has a header that does not fit {out.numel()} elements")

    def _add_bitmap(self, bitmap: torch.Tensor, values: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        rest = out.numel() % 8
        beyond = bool(rest) and int(bitmap[-1]) >> rest != 0
        if fused(out):
            from paceline.codecs.kernels import bitmaps

            counts = np.zeros(-(-out.numel() // BLOCK), np.int64)
            spread(bitmaps.count_bitmap, out.numel(), bitmap.numpy(), BLOCK, counts, unit=BLOCK)
            if not beyond and int(counts.sum()) == values.numel():
                if not values.numel():
                    return
                place = (bitmap.numpy(), values.numpy(), out.numpy(), BLOCK, np.cumsum(counts) - counts)
                spread(bitmaps.add_bitmap, out.numel(), *place, np.float32(weight), unit=BLOCK)
                return
        else:
            bits = bitmap[:, None] >> torch.arange(8, dtype=torch.uint8, device=bitmap.device) & 1
            positions = bits.view(-1).nonzero().view(-1)
            if not beyond and positions.numel() == values.numel():
                out[positions] += values * weight
                return
        raise PayloadError(f"a payload of {self.words} has a bitmap of other than {values.numel()} elements")


def _write_bitmap(
    x: torch.Tensor, residual: torch.Tensor | None, bitmap: torch.Tensor, values: torch.Tensor, offsets: Array
) -> None:
    if fused(x):
        from paceline.codecs.kernels import bitmaps

        unsaid = np.empty(0, np.float32) if residual is None else residual.numpy()
        place = (x.numpy(), unsaid, bitmap.numpy(), values.numpy(), BLOCK, offsets)
        spread(bitmaps.encode_bitmap, x.numel(), *place, unit=BLOCK)
        return
    whole = x if residual is None else x + residual
    there = whole.view(torch.int32) != 0
    bits = torch.zeros(8 * bitmap.numel(), dtype=torch.uint8, device=x.device)
    bits[: x.numel()] = there
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    bitmap.copy_((bits.view(-1, 8) * powers).sum(1, dtype=torch.uint8))
    values.copy_(whole[there].view(torch.uint8))
