"""Threshold: only magnitudes that reach a threshold travel; a residual keeps the others until they have grown.

The payload is as long as there is something to say. Where positions and values would take more bytes than the whole
tensor, the whole tensor travels, in float32.

References: Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015 (fixed); Dryden et al.,
Communication quantization for data-parallel training, 2016 (a share of the elements).
"""

from __future__ import annotations

import math

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
from paceline.codecs.records import (
    BLOCK,
    HEADER_BYTES,
    Records,
    add_records,
    check_density,
    check_values,
    count_above,
    read_counts,
    read_header,
    sampled_cut,
    write_above,
    write_counts,
)
from paceline.core.errors import ConfigError
from paceline.core.words import finite

DENSE = 2  # the flag of a payload that holds every element


class Threshold:
    """Elements with |x| ≥ the threshold: a fixed one, or one that about a given share of the elements reaches.

    The threshold of a share is estimated anew at each call, from a sample: there is no state to save or to agree upon.
    Zeros do not travel.

    Args:
        value: the fixed threshold. All-reduce gives a codec gradients that are divided by the number of members: what
            a member adds to the mean is compared, not its gradient.
        density: the share of elements that should travel. One of both is given.
        values: "float32" | "bf16" | "fp16" | "int8" (with one scale for each 4096 elements) | "2bit".
    """

    unbiased = False
    adds_as = None
    varies = True
    rows = 1

    def __init__(self, value: float | None = None, density: float | None = None, values: str = "float32") -> None:
        if (value is None) == (density is None):
            raise ConfigError("threshold(value=…, density=…): give one of both, such as threshold(density=0.01)")
        if density is not None:
            check_density(density, "threshold")
        if value is not None and not (finite(value) and 2.0**-126 <= value <= 3.4e38):
            raise ConfigError(f"threshold(value={value!r}): a magnitude above 0, such as 0.01, that a float32 can hold")
        check_values(values, "threshold")
        self.value, self.density, self.values = value, density, values

    @property
    def words(self) -> str:
        setting = f"density={self.density}" if self.value is None else f"value={self.value}"
        return f"threshold({setting}, values={self.values!r})"

    def nbytes(self, numel: int) -> int:
        return HEADER_BYTES + 4 * numel

    def head_bytes(self, numel: int) -> int:
        return 0

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        return None

    def bound(self, x: torch.Tensor) -> float:
        largest = largest_magnitude(x)
        if self.value is None or self.values != "float32":
            return largest
        return min(largest, float(torch.tensor(self.value)))

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        check_encode(x, residual, out, self)
        if self.density is None:
            cut = int(torch.tensor(self.value).view(torch.int32))
        else:
            cut = sampled_cut(x, residual, self.density, context)
        counts, largest = count_above(x, residual, cut)
        check_finite(largest, self)
        records = Records(x.numel(), BLOCK, self.values, counts, HEADER_BYTES + 2 * len(counts))
        if records.end > self.nbytes(x.numel()):
            return write_dense(x, residual, out)
        write_counts(records, 0, out)
        write_above(x, residual, out, records, cut)
        return records.end

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_decode(payload, out, self)
        flag, count = read_header(payload, self)
        if flag == DENSE and count == out.numel():
            check_length(payload, self.nbytes(out.numel()), self)
            values = read_values(payload[HEADER_BYTES:])
            if not math.isfinite(largest_magnitude(values)):
                raise PayloadError(f"a payload of {self.words} has values that are not finite")
            out.add_(values, alpha=weight)
        elif flag == 0:
            records = read_counts(payload, out.numel(), self.values, count, self)
            add_records(payload, out, weight, records, self)
        else:
            raise PayloadError(f"a payload of {self.words} has a header that does not fit {out.numel()} elements")


def write_dense(x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> int:
    """Write every element; how many bytes. Nothing is left unsaid."""
    whole = x if residual is None else residual.add_(x)
    write_header(x.numel(), DENSE, out)
    size = HEADER_BYTES + 4 * x.numel()
    out[HEADER_BYTES:size].copy_(whole.view(torch.uint8))
    if residual is not None:
        residual.zero_()
    return size


def write_header(count: int, flag: int, out: torch.Tensor) -> None:
    out[:HEADER_BYTES] = torch.tensor(list((flag << 56 | count).to_bytes(HEADER_BYTES, "little")), dtype=torch.uint8)


def read_values(payload: torch.Tensor) -> torch.Tensor:
    """Float32 values from bytes that may stand anywhere."""
    if payload.storage_offset() % 4 == 0 and payload.data_ptr() % 4 == 0:
        return payload.view(torch.float32)
    values = torch.empty(payload.numel() // 4, device=payload.device)
    values.view(torch.uint8).copy_(payload)
    return values
