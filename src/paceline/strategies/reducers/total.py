"""Codes that add are summed on their way around the ring, and the rest beside them.

Where members must first agree, on the scale of a block, its largest magnitude over all members travels before.
"""

from __future__ import annotations

import math

import torch

from paceline.codecs import Codec
from paceline.codecs.codec import largest_magnitude
from paceline.strategies.reducers.coder import Bucket, Coder, Watch
from paceline.transport.arena import Collective


class Total:
    """A bucket whose codes add."""

    def __init__(self, codec: Codec, coder: Coder, bucket: Bucket) -> None:
        assert codec.adds_as is not None
        self._codec, self._coder, self._bucket = codec, coder, bucket
        self._dtype = codec.adds_as
        self._rooms: list[torch.Tensor] = []
        self._plain = [
            slice(a, b)
            for a, b in zip(
                [0, *(p.at.stop for p in bucket.pieces)], [*(p.at.start for p in bucket.pieces), bucket.numel]
            )
            if b > a
        ]

    def reduce(self, flat: torch.Tensor, collective: Collective) -> None:
        codec, coder, watch = self._codec, self._coder, Watch()
        pieces, place = self._bucket.pieces, (collective.position, collective.size)
        if not self._rooms:
            self._rooms = [torch.empty(codec.nbytes(p.numel), dtype=torch.uint8, device=flat.device) for p in pieces]
        finite = self._bucket.finite(flat)
        agreed, wire_s = self._agree(flat, finite, collective)
        spoilt = any(a is not None and not math.isfinite(largest_magnitude(a)) for a in agreed)
        encode_s = watch.lap() - wire_s
        codes = []
        for piece, room, common in zip(pieces, self._rooms, agreed):
            numbers = room[codec.head_bytes(piece.numel) :].view(self._dtype)
            if finite and not spoilt:
                coder.encode(codec, piece, flat[piece.at].float(), room, place, common)
            elif finite and coder.takes_feedback(codec):  # another member has nothing to say: all of it stays unsaid
                coder.residual(piece, 1, flat.device).add_(flat[piece.at])
                numbers.zero_()
            elif self._dtype.is_floating_point:
                numbers.fill_(torch.nan)
            else:
                numbers.zero_()
            codes.append(numbers)
        # This member's own codes stay, should they have to be given back.
        summed = torch.cat(codes).to("cpu")
        rest = torch.cat([flat[s] for s in self._plain]).to("cpu") if self._plain else flat[:0].to("cpu")
        encode_s += watch.lap()
        collective.all_reduce(summed)
        collective.all_reduce(rest)
        wire_s += watch.lap()
        if self._dtype.is_floating_point:
            spoilt = not math.isfinite(largest_magnitude(summed))
        here, beside = summed.to(flat.device), rest.to(flat.device)
        for piece, room, numbers in zip(pieces, self._rooms, torch.split(here, [c.numel() for c in codes])):
            head = codec.head_bytes(piece.numel)
            if spoilt:
                flat[piece.at] = torch.nan
            elif head:
                payload = torch.cat([room[:head], numbers.view(torch.uint8)])
                out = torch.zeros(piece.numel, device=flat.device)
                codec.decode_add(payload, out)
                flat[piece.at] = out.to(flat.dtype)
            else:
                flat[piece.at] = numbers.to(flat.dtype)
        for s, values in zip(self._plain, torch.split(beside, [s.stop - s.start for s in self._plain])):
            flat[s] = values
        coder.note(self._bucket, flat, spoilt)
        coder.cost.add(encode_s, wire_s, watch.lap())

    def _agree(
        self, flat: torch.Tensor, finite: bool, collective: Collective
    ) -> tuple[list[torch.Tensor | None], float]:
        """What members agree on for each piece, and how long that took on the wire."""
        codec, coder, said = self._codec, self._coder, []
        for piece in self._bucket.pieces:
            residual = coder.residual(piece, 1, flat.device) if coder.takes_feedback(codec) else None
            said.append(codec.agree(flat[piece.at].float(), residual))
        if not said or said[0] is None:
            return [None] * len(said), 0.0
        watch, own = Watch(), torch.cat([s for s in said if s is not None]).to("cpu")
        if not finite:
            own.fill_(torch.inf)
        everyone = torch.empty(collective.size * own.numel())
        collective.all_gather(own, everyone)
        most = everyone.view(collective.size, -1).amax(0).to(flat.device)
        parts = torch.split(most, [s.numel() for s in said if s is not None])
        return list(parts), watch.lap()
