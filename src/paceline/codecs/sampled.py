"""Sampled top-k: the largest magnitudes of a whole tensor travel, above a threshold that a sample of it suggests.

Finding the exact k-th largest of millions takes longer than to send some more. What travels are `Records`, after the
counts of each block.

Reference: Lin et al., Deep gradient compression, 2018.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch

from paceline.codecs.codec import Context, PayloadError, check_decode, check_encode, check_finite, largest_magnitude
from paceline.codecs.records import (
    BLOCK,
    HEADER_BYTES,
    SCALE_BYTES,
    VALUES,
    Array,
    Records,
    add_records,
    check_density,
    check_values,
    count_above,
    read_counts,
    read_header,
    sampled_cut,
    share,
    write_above,
    write_counts,
)


class SampledTopK:
    """About `density` · numel elements of the whole tensor: those that reach a threshold which a sample suggests.

    A layer's larger gradients take places from smaller ones anywhere in it, which chunks of their own do not allow. At
    most a quarter more than asked for travels: where the sample was wrong by more, the threshold is searched for.
    Zeros do not travel.

    Args:
        density: the share of elements that travels.
        values: "float32" | "bf16" | "fp16" | "int8" (with one scale for each 4096 elements) | "2bit".
    """

    unbiased = False
    adds_as = None
    varies = True
    rows = 1

    def __init__(self, density: float = 0.01, values: str = "float32") -> None:
        check_density(density, "sampled_topk")
        check_values(values, "sampled_topk")
        self.density, self.values = density, values

    @property
    def words(self) -> str:
        return f"sampled_topk(density={self.density}, values={self.values!r})"

    def nbytes(self, numel: int) -> int:
        most, num_blocks = self._most(numel), -(-numel // BLOCK)
        spoken = min(most, num_blocks)  # blocks that have a record, at the most
        index_bytes = (most * (BLOCK - 1).bit_length() + 7 * spoken) // 8
        bits = VALUES[self.values]
        value_bytes = -(-most * bits // 8) + (spoken if bits % 8 else 0)
        return HEADER_BYTES + 2 * num_blocks + index_bytes + value_bytes + SCALE_BYTES.get(self.values, 0) * spoken

    def head_bytes(self, numel: int) -> int:
        return 0

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        return None

    def bound(self, x: torch.Tensor) -> float:
        return largest_magnitude(x)

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        check_encode(x, residual, out, self)
        cut = sampled_cut(x, residual, self.density, context)
        counts, largest = count_above(x, residual, cut)
        check_finite(largest, self)
        most = self._most(x.numel())
        if counts.sum() > most:
            cut, counts = self._search(x, residual, cut, counts, largest)
        counts = np.diff(np.minimum(np.cumsum(counts), most), prepend=0)
        records = Records(x.numel(), BLOCK, self.values, counts, HEADER_BYTES + 2 * len(counts))
        write_counts(records, 0, out)
        write_above(x, residual, out, records, cut)
        return records.end

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_decode(payload, out, self)
        flag, count = read_header(payload, self)
        if flag or count > self._most(out.numel()):
            raise PayloadError(f"a payload of {self.words} has a header that does not fit {out.numel()} elements")
        records = read_counts(payload, out.numel(), self.values, count, self)
        add_records(payload, out, weight, records, self)

    def _most(self, numel: int) -> int:
        return min(numel, math.ceil(1.25 * share(self.density, numel)))

    def _search(
        self, x: torch.Tensor, residual: torch.Tensor | None, low: int, counts: Array, largest: float
    ) -> tuple[int, Array]:
        """A cut that the right number of elements reaches, where too many reach `low`.

        Where too many are equal, only the larger ones travel, or the first of the equal ones where none is larger.
        """
        least, most = share(self.density, x.numel()), self._most(x.numel())
        high, counts_high = _bits(largest) + 1, np.zeros_like(counts)
        while high - low > 1:
            middle = (low + high) // 2
            found, _ = count_above(x, residual, middle)
            if found.sum() > most:
                low, counts = middle, found
            else:
                high, counts_high = middle, found
                if found.sum() >= least:
                    break
        return (high, counts_high) if counts_high.any() else (low, counts)


def _bits(value: float) -> int:
    """
    >>> hex(_bits(1.0))
    '0x3f800000'
    """
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
