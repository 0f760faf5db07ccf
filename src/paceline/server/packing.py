"""Codes between workers and servers on other hosts, piece by piece: of gradients, and with `back=` of weights.

    push   gradient, with what earlier ones left unsaid → codes → the server applies what they say
    back   weights − what this worker has → codes → both add what they say to what it has

Small pieces travel as they are: they are few bytes and matter much. What a codec leaves unsaid of a gradient is added
to the next one of the same piece; where a push was dropped, what it had said is unsaid again. What it leaves unsaid of
weights is part of the next difference by itself. Weights that a worker asks for, and the first ones that it gets, come
as they are: from there both sides begin.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.codecs import Codec, Context, PayloadError, make_codec
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.words import split
from paceline.server.placement import Chunk, Piece, dtype_of

_SMALL = 1024  # elements

Key = tuple[int, int, int]  # tensor, start, stop


class Codecs(NamedTuple):
    """In which a worker pushes, and weights come back; None: as they are."""

    push: Codec
    back: Codec | None


class Packer:
    """A worker's side, for the pieces of one server."""

    def __init__(self, words: str, *, rank: int) -> None:
        self.codec, self.back = servable(words)
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
        payload = _encoded(codec, piece, values, self.residuals.get(key), step, self._rank)
        if key in self.residuals:
            self._said[key] = payload
        return payload


class Trace:
    """What a worker has of one server's chunks, bit for bit, on the server's side."""

    def __init__(self, codec: Codec, chunks: Sequence[Chunk], *, rank: int) -> None:
        self._codec = codec
        self._chunks = chunks
        self._rank = rank
        self._has: dict[int, torch.Tensor] = {}  # by chunk
        self._said = 0

    @torch.no_grad()
    def say(self, index: int, weights: torch.Tensor, *, exact: bool) -> tuple[tuple[int, ...], torch.Tensor]:
        """Bring a worker to a chunk's weights: the bytes of each piece's codes, none where it gets them as they are.

        The weights are read once: a server may go on changing them meanwhile.
        """
        chunk = self._chunks[index]
        if not any(coded(chunk, piece) for piece in chunk.pieces):
            return (), weights
        if index in self._has and not exact:
            try:
                return self._codes(chunk, self._has[index], weights)
            except PacelineError:  # nan or inf
                pass
        if index in self._has:
            self._has[index].copy_(weights)
        else:
            self._has[index] = weights.clone()
        return (), self._has[index]

    def _codes(self, chunk: Chunk, has: torch.Tensor, weights: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
        self._said += 1
        parts = []
        for piece in chunk.pieces:
            values = weights[piece.at : piece.at + piece.numel]
            if coded(chunk, piece):
                difference = values - has[piece.at : piece.at + piece.numel]
                parts.append(_encoded(self._codec, piece, difference, None, self._said, self._rank))
            else:
                parts.append(values.view(torch.uint8))
        sizes, payload = tuple(part.numel() for part in parts), torch.cat(parts)
        add(self._codec, chunk, sizes, payload, [has[piece.at : piece.at + piece.numel] for piece in chunk.pieces])
        return sizes, payload


def unpack(codec: Codec, chunk: Chunk, sizes: tuple[int, ...], payload: torch.Tensor) -> torch.Tensor:
    """The gradients of a chunk, on the server.

    Raises:
        PayloadError: the bytes say nothing sensible for this chunk.
    """
    flat = torch.zeros(chunk.numel, dtype=dtype_of(chunk.dtype))
    add(codec, chunk, sizes, payload, [flat[piece.at : piece.at + piece.numel] for piece in chunk.pieces])
    return flat


def add(
    codec: Codec, chunk: Chunk, sizes: tuple[int, ...], payload: torch.Tensor, views: Sequence[torch.Tensor]
) -> None:
    """Add what codes say to a chunk's pieces, which are these; what travels as it is takes their place.

    Raises:
        PayloadError: the bytes say nothing sensible for this chunk.
    """
    if len(sizes) != len(chunk.pieces) or sum(sizes) != payload.numel() or min(sizes, default=0) < 0:
        raise PayloadError(f"{payload.numel()} bytes for {len(chunk.pieces)} pieces of a chunk, in {len(sizes)} parts")
    at = 0
    for piece, size, view in zip(chunk.pieces, sizes, views):
        part = payload[at : at + size]
        at += size
        if not size:
            continue  # no gradient
        if coded(chunk, piece):
            codec.decode_add(part.clone(), view)
        elif size == view.nbytes:
            view.view(torch.uint8).copy_(part)
        else:
            raise PayloadError(f"{size} bytes for a piece of {view.nbytes}")


def _encoded(
    codec: Codec, piece: Piece, values: torch.Tensor, residual: torch.Tensor | None, step: int, rank: int
) -> torch.Tensor:
    out = torch.empty(codec.nbytes(piece.numel), dtype=torch.uint8)
    seed = hash((rank, piece.tensor, piece.start, piece.stop)) & 0x7FFFFFFF
    return out[: codec.encode_into(values, residual, out, Context(step=step, seed=seed))]


def coded(chunk: Chunk, piece: Piece) -> bool:
    return chunk.dtype == "float32" and piece.numel >= _SMALL


def most(codec: Codec, chunk: Chunk) -> int:
    """How many bytes the codes of a chunk take at the most."""
    size = dtype_of(chunk.dtype).itemsize
    return sum(codec.nbytes(p.numel) if coded(chunk, p) else p.numel * size for p in chunk.pieces)


def servable(words: str) -> Codecs:
    """Codecs that a worker and its servers can use without the other workers.

    Raises:
        ConfigError: members would have to agree on something first, or weights cannot come back so.

    >>> servable("topk(0.01), back=quantize(8)").back.words
    'quantize(bits=8, block=256)'
    """
    name, behind = split(words, ("back", "feedback", "warmup"), "codec")
    if behind.keys() - {"back"} or name.partition("(")[0].strip() in ("auto", "lowrank"):
        raise ConfigError(f"codec {words!r} is for all-reduce: workers push to servers each by itself; use another one")
    back = behind.get("back", "none")
    codecs = Codecs(make_codec(name), None if back in ("", "none") else make_codec(back))
    for codec in codecs:
        if codec and codec.agree(torch.ones(_SMALL), None) is not None:
            raise ConfigError(f"codec {words!r} needs members that agree on scales: leave out shared=True")
    if codecs.back and codecs.back.rows > 1:
        raise ConfigError(f"back={codecs.back.words}: it is for gradients, not for weights; use quantize(8), say")
    return codecs
