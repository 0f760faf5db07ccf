"""Fused kernel of codes whose scales all members share. codecs/shared_scale.py has its torch form and says what it is.

As in packing.py: the range begins at a block, slices are taken before the inner loop, and types are spelled out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.codecs.kernels.fuse import fuse
from paceline.codecs.kernels.random import draw


@fuse
def write_codes(
    start: int,
    stop: int,
    x: Any,
    residual: Any,
    block: int,
    levels: Any,
    drawn: bool,
    key: Any,
    other_key: Any,
    scales: Any,
    inverses: Any,
    codes: Any,
) -> None:
    """One code for each element, at most `levels` (float32) in magnitude, whatever the element is."""
    kept = residual.size > 0
    rounding = np.float32(12582912.0)  # 1.5 · 2**23: adding it leaves no bits below one, rounded half to even
    for number in range(start // block, (stop + block - 1) // block):
        first = number * block
        last = min(first + block, stop)
        scale = scales[number]
        inverse = inverses[number]
        fresh, old, packed = x[first:last], residual[first:last], codes[first:last]
        for j in range(fresh.size):
            p = fresh[j] + old[j] if kept else fresh[j]
            steps = abs(p) * inverse
            steps = steps if steps < levels else levels
            if drawn:
                down = np.float32(np.int32(steps))
                up = draw(first + j, key, other_key) < steps - down
                steps = down + np.float32(1.0) if up else down
            else:
                steps = (steps + rounding) - rounding
            steps = -steps if p < np.float32(0.0) else steps
            packed[j] = np.int8(np.int32(steps))
            if kept:
                old[j] = p - steps * scale
