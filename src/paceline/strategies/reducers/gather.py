"""Everyone gets everyone's message and adds them up in the order of the members: the same bits everywhere.

(n−1) · B bytes leave each of n members, in one round.
"""

from __future__ import annotations

import torch

from paceline.codecs import Codec
from paceline.strategies.reducers.coder import Bucket, Coder, Watch
from paceline.strategies.reducers.frame import Frame, gather
from paceline.transport.arena import Collective


class Gather:
    """A bucket whose codes do not add."""

    def __init__(self, codec: Codec, coder: Coder, bucket: Bucket) -> None:
        self._codec = codec
        self._coder = coder
        self._bucket = bucket
        self._frame = Frame(codec, bucket, slice(0, bucket.numel))

    def reduce(self, flat: torch.Tensor, collective: Collective) -> None:
        frame, coder, watch = self._frame, self._coder, Watch()
        place = (collective.position, collective.size)
        message = frame.encode(
            flat,
            self._bucket.finite(flat),
            lambda codec, piece, x, out: coder.encode(codec, piece, x, out, place),
        )
        encode_s = watch.lap()
        sizes = None if self._codec.varies else [frame.nbytes] * collective.size
        messages = gather(message, sizes, frame.nbytes, collective)
        wire_s = watch.lap()
        says = [frame.says(m, position) for position, m in enumerate(messages)]
        out = flat.zero_() if flat.dtype == torch.float32 else torch.zeros_like(flat, dtype=torch.float32)
        for position, m in enumerate(messages):
            frame.add(m, out, position)
        if not all(says):
            frame.spoil(out)
        if out is not flat:
            flat.copy_(out)
        coder.note(self._bucket, flat, not all(says))
        coder.cost.add(encode_s, wire_s, watch.lap())
