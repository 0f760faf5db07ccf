"""What a worker pushes to servers on other hosts instead of gradients: codes, piece by piece.

Small pieces travel as they are: they are few bytes and matter much. What a codec leaves unsaid is added to the next
gradient of the same piece; where a push was dropped, what it had said is unsaid again.
"""

from __future__ import annotations

import time

import torch

from paceline.codecs import Codec, Context, PayloadError, make_codec
from paceline.core.errors import ConfigError
from paceline.core.words import split
from paceline.server.placement import Chunk, Piece, dtype_of

_SMALL = 1024  # elements

Key = tuple[int, int, int]  # tensor, start, stop


class Packer:
    """A worker's side, for the pieces of one server."""

    def __init__(self, words: str, *, rank: int) -> None:
        self.codec = servable(words)
        self.residuals: dict[Key, torch.Tensor] = {}
        self.bytes_before = self.bytes_after = 0
        self.encode_s = 0.0
        self._rank = rank
        self._said: dict[Key, torch.Tensor] = {}  # payloads of the push under way

    def pack(
        self, chunk: Chunk, flat: torch.Tensor, missing: tuple[int, ...], step: int
    ) -> tuple[tuple[int, ...], torch.Tensor]:
        """The bytes of a chunk's gradients, and how many of them are each piece's."""
        began = time.perf_counter()
        parts = []
        for number, piece in enumerate(chunk.pieces):
            values = flat[piece.at : piece.at + piece.numel]
            if number in missing:
                parts.append(torch.empty(0, dtype=torch.uint8))
            elif coded(chunk, piece):
                parts.append(self._encode(piece, values, step))
            else:
                parts.append(values.view(torch.uint8))
        payload = torch.cat(parts)
        self.bytes_before += chunk.nbytes
        self.bytes_after += payload.numel()
        self.encode_s += time.perf_counter() - began
        return tuple(part.numel() for part in parts), payload

    def end(self, *, dropped: bool) -> None:
        """The push is over; where it was dropped, what it said is unsaid."""
        for key, payload in self._said.items() if dropped else ():
            self.codec.decode_add(payload, self.residuals[key][: key[2] - key[1]])
        self._said.clear()

    def _encode(self, piece: Piece, values: torch.Tensor, step: int) -> torch.Tensor:
        codec, key = self.codec, (piece.tensor, piece.start, piece.stop)
        if not codec.unbiased and key not in self.residuals:
            self.residuals[key] = torch.zeros(codec.rows * piece.numel)
        out = torch.empty(codec.nbytes(piece.numel), dtype=torch.uint8)
        seed = hash((self._rank, *key)) & 0x7FFFFFFF
        size = codec.encode_into(values, self.residuals.get(key), out, Context(step=step, seed=seed))
        payload = out[:size]
        if key in self.residuals:
            self._said[key] = payload
        return payload


def unpack(codec: Codec, chunk: Chunk, sizes: tuple[int, ...], payload: torch.Tensor) -> torch.Tensor:
    """The gradients of a chunk, on the server.

    Raises:
        PayloadError: the bytes say nothing sensible for this chunk.
    """
    flat = torch.zeros(chunk.numel, dtype=dtype_of(chunk.dtype))
    if len(sizes) != len(chunk.pieces) or sum(sizes) != payload.numel() or min(sizes, default=0) < 0:
        raise PayloadError(f"{payload.numel()} bytes for {len(chunk.pieces)} pieces of a chunk, in {len(sizes)} parts")
    at = 0
    for piece, size in zip(chunk.pieces, sizes):
        view, part = flat[piece.at : piece.at + piece.numel], payload[at : at + size]
        at += size
        if not size:
            continue  # no gradient
        if coded(chunk, piece):
            codec.decode_add(part.clone(), view)
        elif size == view.nbytes:
            view.view(torch.uint8).copy_(part)
        else:
            raise PayloadError(f"{size} bytes for a piece of {view.nbytes}")
    return flat


def coded(chunk: Chunk, piece: Piece) -> bool:
    return chunk.dtype == "float32" and piece.numel >= _SMALL


def most(codec: Codec, chunk: Chunk) -> int:
    """How many bytes the codes of a chunk take at the most."""
    size = dtype_of(chunk.dtype).itemsize
    return sum(codec.nbytes(p.numel) if coded(chunk, p) else p.numel * size for p in chunk.pieces)


def servable(words: str) -> Codec:
    """A codec that a worker can use without the others.

    Raises:
        ConfigError: members would have to agree on something first.
    """
    name, behind = split(words, ("back", "feedback", "warmup"), "codec")
    if behind or name.partition("(")[0].strip() in ("auto", "lowrank"):
        raise ConfigError(f"codec {words!r} is for all-reduce: workers push to servers each by itself; use another one")
    codec = make_codec(words)
    if codec.agree(torch.ones(_SMALL), None) is not None:
        raise ConfigError(f"codec {words!r} needs members that agree on scales: leave out shared=True")
    return codec
