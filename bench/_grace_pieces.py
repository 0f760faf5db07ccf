"""What of a gradient stands in which message, for `bench.grace`.

Pieces          which elements of a row are encoded, parameter by parameter, and which travel as they are
cut_in_parts    with a codec on the way back too: parameters are cut where `TwoWay` cuts them. All parts of a row of
                sums are one row of a second `Form`, whose residuals are those of the parts' owners
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.codecs import Codec
from paceline.strategies.reducers.coder import Bucket, Piece
from paceline.strategies.reducers.frame import Frame
from paceline.strategies.reducers.two_way import cut

HEAD_BYTES, LENGTH_BYTES = 8, 4  # of a message, and of each of its pieces


def padded(nbytes: int) -> int:
    return -(-nbytes // 4) * 4


class Pieces:
    """Parameters of at least `small` elements are pieces that are encoded; the others travel as they are.

    With a codec for `rest`, these others are one more piece, one after another, which that codec encodes.
    """

    def __init__(self, sizes: Sequence[int], small: int, rest: Codec | None = None) -> None:
        ends = np.cumsum(sizes)
        self.numel = int(ends[-1])
        self.at = [slice(int(end) - n, int(end)) for n, end in zip(sizes, ends) if n >= small]
        self.rest, num_rest = rest, self.numel - sum(self.sizes)
        self.rest_sizes = [num_rest]
        self.plain_bytes = 4 * num_rest if rest is None else LENGTH_BYTES + padded(rest.nbytes(num_rest))
        self.places = [i for n, end in zip(sizes, ends) if n < small for i in range(int(end) - n, int(end))]
        self.messages = 1

    @property
    def sizes(self) -> list[int]:
        return [at.stop - at.start for at in self.at]

    @classmethod
    def of_frames(cls, frames: Sequence[Frame], rest: Codec) -> Pieces:
        """What of a row stands in these messages; `rest` encodes their small ones."""
        pieces = cls([frames[-1].at.stop], 1, rest)
        pieces.at = [piece.at for frame in frames for piece in frame.coded]
        small = [[slice(f.at.start + s.start, f.at.start + s.stop) for s in f.small] for f in frames]
        pieces.places = [i for slices in small for s in slices for i in range(s.start, s.stop)]
        pieces.rest_sizes = [sum(s.stop - s.start for s in slices) for slices in small if slices]
        num_plain = pieces.numel - sum(pieces.sizes) - sum(pieces.rest_sizes)
        pieces.plain_bytes = 4 * num_plain + sum(LENGTH_BYTES + padded(rest.nbytes(n)) for n in pieces.rest_sizes)
        pieces.messages = len(frames)
        return pieces

    def message(self, payloads: Sequence[int]) -> int:
        """The bytes of a row's messages with payloads of these lengths."""
        pieces = sum(LENGTH_BYTES + padded(n) for n in payloads)
        return padded(self.messages * HEAD_BYTES + pieces + self.plain_bytes)

    def of_elements(self, device: torch.device) -> Tensor:
        """The piece of each element; as many as there are pieces, where it travels as it is."""
        of = torch.full((self.numel,), len(self.at))
        for i, at in enumerate(self.at):
            of[at] = i
        return of.to(device)


def cut_in_parts(
    sizes: Sequence[int], codec: Codec, back: Codec, rest: Codec, members: int
) -> tuple[Pieces, Pieces, int, int]:
    """The pieces of both ways, and the bytes of a message on each: all are given the room of the longest."""
    ends = np.cumsum(sizes)
    parameters = [Piece(str(i), slice(int(end) - n, int(end)), i + 1) for i, (n, end) in enumerate(zip(sizes, ends))]
    bucket = Bucket.of(torch.float32, int(ends[-1]), parameters)
    parts = cut(bucket, (codec, back), members)
    there, home = ([Frame(each, bucket, at) for at in parts] for each in (codec, back))
    longest = [max(frame.nbytes for frame in frames) for frames in (there, home)]
    return Pieces.of_frames(there, rest), Pieces.of_frames(home, rest), longest[0], longest[1]
