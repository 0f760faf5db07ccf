"""AsIs: float32 as it is, where there must be a code and a user wants none. Between members nothing is encoded then."""

from __future__ import annotations

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


class AsIs:
    """What "none" says to a guest."""

    words = "none"
    unbiased = True
    adds_as = None
    varies = False
    rows = 1

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def head_bytes(self, numel: int) -> int:
        return 0

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        return None

    def bound(self, x: torch.Tensor) -> float:
        return 0.0

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        check_encode(x, residual, out, self)
        whole = x if residual is None else x + residual
        check_finite(largest_magnitude(whole), self)
        out[: 4 * x.numel()].copy_(whole.view(torch.uint8))
        if residual is not None:
            residual.zero_()
        return 4 * x.numel()

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_decode(payload, out, self)
        check_length(payload, 4 * out.numel(), self)
        values = torch.empty_like(out)
        values.view(torch.uint8).copy_(payload)  # which may stand anywhere
        if not largest_magnitude(values) <= torch.finfo(torch.float32).max:
            raise PayloadError("a payload has values that are not finite")
        out.add_(values, alpha=weight)
