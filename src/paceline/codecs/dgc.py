"""Deep gradient compression: top-k with the optimizer's momentum before it (Lin and others 2018).

    g ← g · min(1, clip · N^(−1/2) / ‖g‖)        local clipping: N members' sum has about the norm that one had
    u ← m · u + g;   v ← v + u                   momentum correction: what waits in v gathers momentum as it would have
    send the largest of v;   v, u ← 0 there      factor masking: momentum that is older than what was sent ends

v and u are the two rows of the residual. With sums that are as sparse as 0.1 %, an optimizer's momentum behind them
would forget most of what was held back, and one on both sides would count twice. So the optimizer that applies the sum
must have no momentum of its own; the strategy looks at `momentum` and checks that.

References: Lin, Han, Mao, Wang and Dally, Deep gradient compression: reducing the communication bandwidth for
distributed training, 2018.
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
from paceline.codecs.kernels import dense
from paceline.codecs.kernels.spread import spread
from paceline.codecs.records import Records, add_records, check_density, check_values, fused, keep_unsaid, magnitude_of
from paceline.codecs.topk import top_positions, top_records
from paceline.core.errors import ConfigError
from paceline.core.words import finite

_CHUNK = 4096
_STAGE_BYTES = 4
_RAMP = (0.25, 0.0625, 0.015625, 0.004)


class DGC:
    """The `density` · 4096 largest of each 4096 elements, with momentum correction, local clipping and a warm-up.

    The published method clips by the norm of the whole gradient. Here each parameter is clipped by itself: buckets
    leave before the whole gradient is known. Without a residual there is no momentum: top-k, perhaps clipped, is left.

    A payload is the stage of the warm-up (4 bytes), then the records of top-k.

    Args:
        density: the share of elements that travels.
        momentum: m, from 0 to below 1.
        clip: the norm of one parameter's gradient that is let through, were there one member; 0: all.
        ramp: for so many passes more travels: 25 %, 6.25 %, 1.5625 % and 0.4 %, as many of these as are above the
            density, for equally many passes each.
        values: "float32" | "bf16" | "fp16" | "int8" (with one scale for each 4096 elements) | "2bit".
    """

    unbiased = False
    adds_as = None
    rows = 2

    def __init__(
        self,
        density: float = 0.001,
        momentum: float = 0.9,
        clip: float = 0.0,
        ramp: int = 0,
        values: str = "float32",
    ) -> None:
        check_density(density, "dgc")
        check_values(values, "dgc")
        if not finite(momentum) or not 0 <= momentum < 1:
            raise ConfigError(f"dgc(momentum={momentum!r}): a number from 0 to below 1 is needed, such as 0.9")
        if not finite(clip) or clip < 0:
            raise ConfigError(f"dgc(clip={clip!r}): a norm above 0 is needed, or 0 to clip nothing")
        if isinstance(ramp, bool) or not isinstance(ramp, int) or ramp < 0:
            raise ConfigError(f"dgc(ramp={ramp!r}): a number of passes is needed, or 0 for no warm-up")
        self.density, self.momentum, self.clip, self.ramp, self.values = density, momentum, clip, ramp, values
        self.varies = ramp > 0
        self._densities = [*(d for d in _RAMP if ramp and d > density), density]

    @property
    def words(self) -> str:
        settings = f"density={self.density}, momentum={self.momentum}, clip={self.clip}, ramp={self.ramp}"
        return f"dgc({settings}, values={self.values!r})"

    def nbytes(self, numel: int) -> int:
        return self._records(numel, 0).end

    def head_bytes(self, numel: int) -> int:
        return 0

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        return None

    def bound(self, x: torch.Tensor) -> float:
        return largest_magnitude(x)

    def stage(self, step: int) -> int:
        """Which of the densities a pass has; passes count from 1.

        >>> [DGC(0.01, ramp=6).stage(step) for step in range(1, 9)]
        [0, 0, 1, 1, 2, 2, 3, 3]
        """
        before = len(self._densities) - 1
        return before if step > self.ramp else max(step - 1, 0) * before // max(self.ramp, 1)

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        check_encode(x, residual, out, self)
        stage = self.stage(context.step)
        records = self._records(x.numel(), stage)
        state = torch.zeros(2 * x.numel(), device=x.device) if residual is None else residual
        factor, momentum = self._factor(x, context.size), np.float32(self.momentum)
        head = torch.tensor([stage], dtype=torch.int32).view(torch.uint8)
        if fused(x):
            from paceline.codecs.kernels import sparse

            fresh = (x.numpy(), state.numpy(), factor, momentum)
            check_finite(magnitude_of(max(spread(sparse.largest, x.numel(), *fresh))), self)
            out[:_STAGE_BYTES] = head
            place = (out.numpy(), _CHUNK, records.counts, records.lows, records.offsets, records.kind)
            spread(sparse.encode_top, x.numel(), *fresh, *place, unit=_CHUNK)
            return records.end
        unsaid, momenta = state.view(2, -1)
        u = momenta * float(momentum) + x * float(factor)
        v = unsaid + u
        check_finite(largest_magnitude(v), self)
        out[:_STAGE_BYTES] = head
        positions = top_positions(v, records)
        keep_unsaid(v, positions, records.write(v, positions, out), unsaid)
        momenta.copy_(u)
        momenta[positions] = 0.0
        return records.end

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_decode(payload, out, self)
        if payload.numel() < _STAGE_BYTES:
            raise PayloadError(f"a payload of {self.words} has {payload.numel()} bytes and no stage of the warm-up")
        stage = int.from_bytes(bytes(payload[:_STAGE_BYTES].tolist()), "little")
        if stage >= len(self._densities):
            raise PayloadError(f"a payload of {self.words} is of stage {stage}, which its warm-up does not have")
        records = self._records(out.numel(), stage)
        check_length(payload, records.end, self)
        add_records(payload, out, weight, records, self)

    def _records(self, numel: int, stage: int) -> Records:
        return top_records(numel, self._densities[stage], _CHUNK, self.values, _STAGE_BYTES)

    def _factor(self, x: torch.Tensor, size: int) -> np.float32:
        """By which a gradient is multiplied to have at most the norm clip · size^(−1/2)."""
        if not self.clip or not x.numel():
            return np.float32(1.0)
        _, mean_square = dense.Blocks(x, None, _CHUNK).largest_and_mean(power=2)
        sums = mean_square * _CHUNK
        sums[-1] = mean_square[-1] * (x.numel() - _CHUNK * (len(sums) - 1))
        norm, limit = math.sqrt(float(sums.sum())), self.clip * size**-0.5
        return np.float32(limit / norm if norm > limit else 1.0)
