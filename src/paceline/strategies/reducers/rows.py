"""Everyone's values side by side, for averages that look at each member's: trimmed mean, median.

    gather    a stretch of the bucket from all members, as it is or as the codec's message
    combine   the rows of it become one; a row that is not finite is left out

A stretch is short, so that memory is bounded by members · stretch however large a parameter is. (n−1) · B bytes leave
each member. What stands behind the gradients in a bucket is not combined.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.codecs import Codec
from paceline.core.errors import PacelineError
from paceline.strategies.reducers.coder import Bucket, Coder, Watch
from paceline.strategies.reducers.frame import Frame, gather
from paceline.transport.arena import Collective

STRETCH = 1 << 18  # elements: 1 MB of each member


class Rows:
    """A bucket that is combined from everyone's values."""

    def __init__(
        self,
        codec: Codec | None,
        coder: Coder,
        bucket: Bucket,
        combine: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._codec, self._coder, self._bucket, self._combine = codec, coder, bucket, combine
        self._stretches = [slice(a, min(a + STRETCH, bucket.end)) for a in range(0, bucket.end, STRETCH)]
        self._frames = [Frame(codec, bucket, at) for at in self._stretches] if codec else []

    def reduce(self, flat: torch.Tensor, collective: Collective) -> None:
        watch, wire_s = Watch(), 0.0
        finite = self._bucket.finite(flat)
        for i, at in enumerate(self._stretches):
            if self._frames:
                rows, took = self._coded(self._frames[i], flat[at], finite, collective)
            else:
                before = Watch()
                everyone = torch.empty(collective.size * (at.stop - at.start), dtype=flat.dtype)
                collective.all_gather(flat[at].to("cpu"), everyone)
                took = before.lap()
                rows = everyone.view(collective.size, -1)
            wire_s += took
            told = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
            good = torch.isfinite(told).all(dim=1)
            if not bool(good.any()):
                raise PacelineError("no member's values are finite, so there is nothing to average")
            flat[at] = self._combine(rows[good]).to(flat.device, flat.dtype)
        self._coder.cost.add(0.0, wire_s, watch.lap() - wire_s)

    def _coded(
        self, frame: Frame, values: torch.Tensor, finite: bool, collective: Collective
    ) -> tuple[torch.Tensor, float]:
        """What each member's message says, and the seconds on the wire."""
        assert self._codec is not None
        place = (collective.position, collective.size)
        message = frame.encode(
            values, finite, lambda codec, piece, x, out: self._coder.encode(codec, piece, x, out, place)
        )
        watch = Watch()
        sizes = None if self._codec.varies else [frame.nbytes] * collective.size
        messages = gather(message, sizes, frame.nbytes, collective)
        took = watch.lap()
        rows = torch.zeros(collective.size, values.numel())
        for position, m in enumerate(messages):
            if frame.says(m, position):
                frame.add(m, rows[position], position)
            else:
                rows[position] = torch.nan
        return rows, took
