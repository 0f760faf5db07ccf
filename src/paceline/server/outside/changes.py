"""Only what changed: blocks of weights told apart by digests, and differences in a code.

    exact     a follower says the digests of its blocks; the desk answers with the blocks that are others now
    coded     the desk keeps what this follower holds (`Trace`), and says the weights' difference from that, chunk by
              chunk; both add what was decoded, so what one answer leaves unsaid is in the next, and errors never add up

Nothing is remembered of an exact follower: it may come back after a cut, or to another start of the run, and still gets
only what it lacks. Chunks that did not change take no bytes in either way.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from paceline.codecs import Codec, Context
from paceline.core.errors import ConfigError
from paceline.server.connection import bytes_of
from paceline.server.outside.calls import make_code
from paceline.server.outside.visits import BLOCK_BYTES, DIGEST_BYTES, Difference, Part
from paceline.server.placement import Chunk, place
from paceline.server.stock import offsets


def digests_of(data: torch.Tensor, blocks: Sequence[int] | None = None) -> bytes:
    """Of the blocks of flat bytes, one after another; of these blocks, where they are named."""
    view = bytes_of(data)
    which = range(-(-len(view) // BLOCK_BYTES)) if blocks is None else blocks
    return b"".join(
        hashlib.sha256(view[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]).digest()[:DIGEST_BYTES] for i in which
    )


def unlike(mine: bytes, theirs: bytes) -> list[int]:
    """The blocks whose digests differ; all where they have others' number.

    >>> unlike(b"a" * 16 + b"b" * 16, b"a" * 16 + b"c" * 16), unlike(b"a" * 32, b"")
    ([1], [0, 1])
    """
    count = len(mine) // DIGEST_BYTES
    if len(mine) != len(theirs):
        return list(range(count))
    ours, others = (np.frombuffer(each, np.uint8).reshape(count, DIGEST_BYTES) for each in (mine, theirs))
    return [int(i) for i in np.flatnonzero((ours != others).any(axis=1))]


def block_bytes(nbytes: int, blocks: Sequence[int]) -> int:
    """How many bytes these blocks of a part have."""
    return sum(min(BLOCK_BYTES, nbytes - i * BLOCK_BYTES) for i in blocks)


@functools.lru_cache(maxsize=64)  # a run's few parts come with every version
def chunks_of(part: Part) -> list[Chunk]:
    """What this server has of a table; not to be changed."""
    return place(part.tensors, part.servers, cut=part.cut, view=part.view).of(part.server)


def chunk_views(chunks: Sequence[Chunk], data: torch.Tensor) -> list[torch.Tensor]:
    """Each chunk of a part's bytes, in its type."""
    return [
        data[at : at + chunk.nbytes].view(getattr(torch, chunk.dtype)) for at, chunk in zip(offsets([*chunks]), chunks)
    ]


class Trace:
    """What one follower holds, bit for bit, on the desk's side."""

    def __init__(self, words: str, parts: tuple[Part, ...], data: Sequence[torch.Tensor]) -> None:
        self.words = words
        self.parts = parts
        self._codec = make_code(words)
        self._data = [each.clone() for each in data]
        self._views = [chunk_views(chunks_of(part), each) for part, each in zip(parts, self._data)]

    def fits(self, words: str, parts: tuple[Part, ...]) -> bool:
        return self.words == words and self.parts == parts

    def say(self, data: Sequence[torch.Tensor]) -> tuple[list[Difference], list[torch.Tensor]]:
        """The way from what it holds to these weights, which it then holds as nearly as the code tells.

        PacelineError where a value is not finite: then what it holds is not known any more.
        """
        found: list[Difference] = []
        payloads: list[torch.Tensor] = []
        for part, held, now in zip(self.parts, self._views, data):
            sizes: list[tuple[int, int]] = []
            for i, (mine, new) in enumerate(zip(held, chunk_views(chunks_of(part), now))):
                if same_bytes(mine, new):
                    continue
                payload = coded(self._codec, new - mine) if codable(mine) else new.view(torch.uint8)
                if payload.numel():
                    take(self._codec, payload, mine)
                    sizes.append((i, payload.numel()))
                    payloads.append(payload)
            found.append(Difference(chunks=sizes, coded=True))
        return found, payloads


def codable(chunk: torch.Tensor) -> bool:
    """Other types travel as they are."""
    return chunk.dtype == torch.float32


def coded(codec: Codec, difference: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codec.nbytes(difference.numel()), dtype=torch.uint8)
    context = Context(agreed=codec.agree(difference, None))
    return out[: codec.encode_into(difference, None, out, context)]


def take(codec: Codec, payload: torch.Tensor, chunk: torch.Tensor) -> None:
    """What a payload says, into what is held; the same on both sides."""
    if codable(chunk):
        codec.decode_add(payload, chunk)
    elif payload.numel() == chunk.numel() * chunk.element_size():
        chunk.view(torch.uint8).copy_(payload)
    else:
        raise ConfigError(f"{payload.numel()} bytes for a chunk of {chunk.numel()} {chunk.dtype}")


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
