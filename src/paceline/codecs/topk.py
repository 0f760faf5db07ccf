"""Top-k: only the k largest magnitudes of each chunk travel, with where they stand; a residual keeps the others.

The payload has a fixed size, and positions take a few bits. What travels are `Records`, without a header.

Reference: Aji and Heafield, Sparse communication for distributed gradient descent, 2017.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from paceline.codecs.codec import Context, check_decode, check_encode, check_finite, check_length, largest_magnitude
from paceline.codecs.kernels.spread import spread
from paceline.codecs.records import (
    PLAIN,
    Records,
    add_records,
    array_of,
    check_density,
    check_values,
    fused,
    keep_unsaid,
    largest_of_sum,
    magnitude_bits,
    share,
)
from paceline.core.errors import ConfigError


class TopK:
    """The `density` · chunk largest magnitudes of each chunk; of equal ones the first.

    Args:
        density: the share of elements that travels.
        chunk: how many elements choose among themselves.
        values: "float32" | "bf16" | "fp16" | "int8" (with one scale for each chunk) | "2bit": a sign and one of two
            magnitudes, the means of those of the chunk that are above the mean of all that travel and below. With
            64 of 4096 elements that is 10.5 bits for each (SparseLoCo, Sarfi and others 2025, has 14).
    """

    unbiased = False
    adds_as = None
    varies = False
    rows = 1

    def __init__(self, density: float = 0.01, chunk: int = 4096, values: str = "float32") -> None:
        check_density(density, "topk")
        check_values(values, "topk")
        if isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk <= 1 << 20:
            raise ConfigError(f"topk(chunk={chunk!r}): 1 to {1 << 20} elements; sampled_topk looks at whole tensors")
        self.density, self.chunk, self.values = density, chunk, values

    @property
    def words(self) -> str:
        return f"topk(density={self.density}, chunk={self.chunk}, values={self.values!r})"

    def nbytes(self, numel: int) -> int:
        return self._records(numel).end

    def head_bytes(self, numel: int) -> int:
        return 0

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        return None

    def bound(self, x: torch.Tensor) -> float:
        if self.density == 1 and self.values == "float32":
            return 0.0
        return largest_magnitude(x)

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        check_encode(x, residual, out, self)
        records = self._records(x.numel())
        check_finite(largest_of_sum(x, residual), self)
        if fused(x):
            from paceline.codecs.kernels import sparse

            place = (out.numpy(), self.chunk, records.counts, records.lows, records.offsets, records.kind)
            spread(sparse.encode_top, x.numel(), x.numpy(), array_of(residual), *PLAIN, *place, unit=self.chunk)
            return records.end
        whole = x if residual is None else x + residual
        positions = top_positions(whole, records)
        keep_unsaid(whole, positions, records.write(whole, positions, out), residual)
        return records.end

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_decode(payload, out, self)
        records = self._records(out.numel())
        check_length(payload, records.end, self)
        add_records(payload, out, weight, records, self)

    def _records(self, numel: int) -> Records:
        return top_records(numel, self.density, self.chunk, self.values, 0)


@functools.lru_cache(maxsize=32)  # a model's few shapes come again and again
def top_records(numel: int, density: float, chunk: int, values: str, start: int) -> Records:
    """Records of the same share of every chunk, the first at byte `start`."""
    counts = np.full(-(-numel // chunk), share(density, chunk), np.int64)
    if numel % chunk:
        counts[-1] = share(density, numel % chunk)
    return Records(numel, chunk, values, counts, start)


def top_positions(whole: torch.Tensor, records: Records) -> torch.Tensor:
    """Where the largest magnitudes of each chunk stand, ascending, in plain torch."""
    numel, chunk = whole.numel(), records.block
    # No two elements have the same key, and of two equal magnitudes the first has the larger one.
    keys = magnitude_bits(whole).long() << 20 | (chunk - 1 - torch.arange(numel, device=whole.device) % chunk)
    edge = numel // chunk * chunk
    positions = torch.empty(0, dtype=torch.int64, device=whole.device)
    if edge:
        firsts = torch.arange(0, edge, chunk, device=whole.device)[:, None]
        positions = (keys[:edge].view(-1, chunk).topk(int(records.counts[0])).indices + firsts).view(-1)
    if edge < numel:
        rest = keys[edge:].topk(int(records.counts[-1])).indices + edge
        positions = torch.cat((positions, rest))
    return positions.sort().values
