"""Each member sums a part of the bucket and sends the sum, encoded again, to all.

    cut      the bucket into n parts of about equally many bytes
    swap     each member sends its codes of part j to member j, which decodes and adds them in the order of members
    gather   member j encodes the sum of part j, perhaps by another codec; all decode the same bytes

2(n−1)/n · B bytes leave each member, as around a ring. There, a sum would be encoded again at each of n−1 hops; here
once, and what that leaves unsaid is kept by the member that summed, for its next sum [1].

[1] H. Tang et al.: 1-bit Adam, 2021, section 4 (compression on the way to the server and back).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from paceline.codecs import Codec
from paceline.strategies.reducers.coder import Bucket, Coder, Watch
from paceline.strategies.reducers.frame import FOR_SMALL, Frame, gather, is_coarse, swap
from paceline.transport.arena import Collective

_ALIGN = 4096  # elements: parts begin at chunks of codecs
_FOR_SMALL = FOR_SMALL.nbytes(1 << 16) / (1 << 16)  # bytes of an element beside a coarse codec


class TwoWay:
    """A bucket that is summed in parts and encoded both ways."""

    def __init__(self, codec: Codec, back: Codec, coder: Coder, bucket: Bucket, place: tuple[int, int]) -> None:
        self._codec, self._back, self._coder, self._bucket = codec, back, coder, bucket
        position, size = self._place = place
        parts = cut(bucket, (codec, back), size)
        self._there = [Frame(codec, bucket, at) for at in parts]
        self._home = [Frame(back, bucket, at) for at in parts]
        coder.fold(bucket, self._home[position].coded)

    def reduce(self, flat: torch.Tensor, collective: Collective) -> None:
        coder, watch, position = self._coder, Watch(), collective.position
        finite = self._bucket.finite(flat)
        messages = [
            frame.encode(
                flat[frame.at],
                finite,
                lambda codec, piece, x, out: coder.encode(codec, piece, x, out, self._place),
            )
            for frame in self._there
        ]
        encode_s = watch.lap()
        longest = max(frame.nbytes for frame in self._there)
        there, home = self._there[position], self._home[position]
        mine = swap(messages, None if self._codec.varies else [there.nbytes] * collective.size, longest, collective)
        wire_s = watch.lap()
        total = torch.zeros(home.at.stop - home.at.start, device=flat.device)
        told = [there.says(m, i) for i, m in enumerate(mine)]
        for i, m in enumerate(mine):
            there.add(m, total, i)
        decode_s = watch.lap()
        message = home.encode(
            total.to(flat.dtype),
            all(told),
            lambda codec, piece, x, out: coder.encode_sum(codec, piece, x, out, self._place),
        )
        encode_s += watch.lap()
        sizes = [frame.nbytes for frame in self._home]
        sums = gather(message, None if self._back.varies else sizes, max(sizes), collective)
        wire_s += watch.lap()
        spoilt = False
        for i, (frame, m) in enumerate(zip(self._home, sums)):
            part = flat[frame.at]
            out = part.zero_() if flat.dtype == torch.float32 else torch.zeros_like(part, dtype=torch.float32)
            says = frame.says(m, i)
            frame.add(m, out, i)
            if not says:
                spoilt = True
                frame.spoil(out)
            if out is not part:
                part.copy_(out)
        coder.note(self._bucket, flat, spoilt)
        coder.cost.add(encode_s, wire_s, decode_s + watch.lap())


def cut(bucket: Bucket, codecs: Sequence[Codec], size: int) -> list[slice]:
    """Parts that take about equally many bytes in all of these codecs, cut where chunks of a piece end."""
    plain = len(codecs) * float(bucket.dtype.itemsize)
    small = sum(_FOR_SMALL if is_coarse(codec) else bucket.dtype.itemsize for codec in codecs)
    spans: list[tuple[int, float, int]] = []  # elements, the bytes that each becomes, and where it may be cut
    at = 0
    for piece in bucket.pieces:
        each = sum(codec.nbytes(piece.numel) for codec in codecs) / piece.numel
        spans += [(piece.at.start - at, small, 1), (piece.numel, each, _ALIGN)]
        at = piece.at.stop
    end = max(bucket.end, at)
    spans += [(end - at, small, 1), (bucket.numel - end, plain, 1)]
    total = sum(n * each for n, each, _ in spans)
    cuts, done, at = [0], 0.0, 0
    for n, each, align in spans:
        while len(cuts) < size and n and done + n * each >= total * len(cuts) / size:
            want = round((total * len(cuts) / size - done) / each / align) * align
            cuts.append(max(at + min(want, n), cuts[-1]))
        done += n * each
        at += n
    cuts += [bucket.numel] * (size + 1 - len(cuts))
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]
