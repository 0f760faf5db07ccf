"""Weights as an outsider holds them: the bytes of each server's part, and the tensors that they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.core.errors import Interrupted
from paceline.server.outside.calls import make_code
from paceline.server.outside.changes import block_bytes, chunk_views, chunks_of, digests_of, take
from paceline.server.outside.visits import BLOCK_BYTES, DIGEST_BYTES, Difference, Part, Pinned
from paceline.server.stock import offsets

Key = tuple[int, int]  # table and server; or table and tensor


class Weights(dict[str, torch.Tensor]):
    """Parameters by name, as they were on the servers.

    `version` rises with every step of the servers, `versions` has each server's, and `mixed` says that these are not
    the weights of one version: where nobody waits for anybody, some pushes are half applied, or applied on some servers
    only.
    """

    version: int
    versions: tuple[int, ...]
    mixed: bool


class Body:
    """One part. `digests` are of its blocks, "" where they are not known."""

    def __init__(self, part: Part, data: torch.Tensor, digests: bytes = b"") -> None:
        self.part, self.data, self.digests = part, data, digests
        self.chunks = chunks_of(part)


class Bodies:
    """All parts of a model."""

    def __init__(self) -> None:
        self._bodies: dict[Key, Body] = {}

    def put(self, part: Part, data: torch.Tensor) -> None:
        self._bodies[part.table, part.server] = Body(part, data)

    def digests(self, parts: Sequence[Part]) -> list[bytes]:
        """Of what there is of these parts, as a desk wants them."""
        found = [self._bodies.get((part.table, part.server)) for part in parts]
        if any(body is None or body.part != part for body, part in zip(found, parts)):
            return []
        for body in found:
            if body and not body.digests:
                body.digests = digests_of(body.data)
        return [body.digests for body in found if body]

    def size(self, part: Part, difference: Difference) -> int:
        """How many bytes follow for a part; Interrupted where that cannot be."""
        if difference.coded:
            sizes = dict(difference.chunks)
            if any(not 0 <= i < len(chunks_of(part)) or n < 0 for i, n in difference.chunks):
                raise Interrupted("the run named chunks that there are not")
            return sum(sizes.values())
        count = -(-part.nbytes // BLOCK_BYTES)
        if any(not 0 <= i < count for i in difference.blocks):
            raise Interrupted("the run named blocks that there are not")
        return block_bytes(part.nbytes, difference.blocks)

    def change(self, part: Part, difference: Difference, data: torch.Tensor, codec: str) -> set[Key]:
        """Take over what came for a part; the tensors that are others now, as table and number."""
        body = self._bodies.get((part.table, part.server))
        if body is None or body.part != part:
            if difference.coded or len(difference.blocks) != -(-part.nbytes // BLOCK_BYTES):
                raise Interrupted("the run said what changed of weights that are not held")
            body = self._bodies[part.table, part.server] = Body(part, torch.empty(part.nbytes, dtype=torch.uint8))
        if difference.coded:
            changed = self._decode(body, difference, data, codec)
        else:
            changed = self._patch(body, difference.blocks, data)
        return {(part.table, tensor) for tensor in changed}

    def tensors(self, wanted: set[Key] | None = None) -> dict[str, torch.Tensor]:
        """By name, each in memory of its own; all, or those of these tables and numbers."""
        found: dict[Key, torch.Tensor] = {}
        for body in self._bodies.values():
            part = body.part
            for at, chunk in zip(offsets(body.chunks), body.chunks):
                flat = body.data[at : at + chunk.nbytes]
                for piece in chunk.pieces:
                    key = part.table, piece.tensor
                    if wanted is not None and key not in wanted:
                        continue
                    if key not in found:
                        like = part.tensors[piece.tensor]
                        found[key] = torch.empty(like.shape, dtype=like.torch_dtype)
                    whole = found[key].view(-1)
                    size = whole.element_size()
                    values = flat[piece.at * size : (piece.at + piece.numel) * size]
                    whole[piece.start : piece.stop].view(torch.uint8).copy_(values)
        names = self._names()
        return {names[key]: found[key] for key in sorted(found)}

    def keep_only(self, parts: Sequence[Part]) -> None:
        """Forget parts that there are no more."""
        kept = {(part.table, part.server) for part in parts}
        self._bodies = {key: body for key, body in self._bodies.items() if key in kept}

    def _names(self) -> dict[Key, str]:
        tables = {body.part.table: body.part.tensors for body in self._bodies.values()}
        names: dict[Key, str] = {}
        taken: set[str] = set()
        for table in sorted(tables):
            for i, tensor in enumerate(tables[table]):
                name = tensor.name if tensor.name not in taken else f"table{table}.{tensor.name}"
                taken.add(name)
                names[table, i] = name
        return names

    def _patch(self, body: Body, blocks: Sequence[int], data: torch.Tensor) -> set[int]:
        at, nbytes = 0, body.data.numel()
        mask = np.zeros(-(-nbytes // BLOCK_BYTES), bool)
        for i in blocks:
            size = min(BLOCK_BYTES, nbytes - i * BLOCK_BYTES)
            body.data[i * BLOCK_BYTES : i * BLOCK_BYTES + size].copy_(data[at : at + size])
            at += size
            mask[i] = True
        new = bytearray(body.digests or bytes(len(mask) * DIGEST_BYTES))
        fresh = digests_of(body.data, blocks)
        for n, i in enumerate(blocks):
            new[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] = fresh[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES]
        body.digests = bytes(new)
        changed: set[int] = set()
        for start, chunk in zip(offsets(body.chunks), body.chunks):
            size = chunk.nbytes // chunk.numel
            for piece in chunk.pieces:
                first, last = start + piece.at * size, start + (piece.at + piece.numel) * size - 1
                if mask[first // BLOCK_BYTES : last // BLOCK_BYTES + 1].any():
                    changed.add(piece.tensor)
        return changed

    def _decode(self, body: Body, difference: Difference, data: torch.Tensor, words: str) -> set[int]:
        codec, views = make_code(words), chunk_views(body.chunks, body.data)
        body.digests = b""
        changed: set[int] = set()
        at = 0
        for i, size in difference.chunks:
            take(codec, data[at : at + size], views[i])
            at += size
            changed |= {piece.tensor for piece in body.chunks[i].pieces}
        return changed


def weights_of(tensors: dict[str, torch.Tensor], pinned: Sequence[Pinned]) -> Weights:
    """With the versions of the copies that they come from."""
    found = Weights(tensors)
    found.versions = tuple(answer.version for answer in pinned)
    found.version = min(found.versions)
    found.mixed = any(answer.mixed for answer in pinned) or len(set(found.versions)) > 1
    return found
