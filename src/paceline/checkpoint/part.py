"""A part of a checkpoint: one state as the bytes of one safetensors file.

`Snapshot` is a part in host memory, copied from the live tensors so that training may go on while it is
written. `pack` and `unpack` make a part travel between members. `read` rebuilds the state from a file. The
structure of the state (see tree) is in the file's metadata under "state": one file, which cannot lose a half.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

import torch

from paceline.checkpoint import layout, rebuild, tree
from paceline.core.errors import CheckpointError

PIECE_BYTES = 8 << 20  # what is read, written and hashed at a time
DIGEST_BYTES = 32


class Snapshot:
    """A copy of `state` in host memory, laid out as the file that it will be.

    `buffer` is memory to reuse: copying 300 MB into fresh memory runs at 0.7 GB/s, since the kernel must find
    and clear every page (2.8 with large pages), and at 10 GB/s into memory that was used before.
    """

    def __init__(self, state: Any, buffer: torch.Tensor | None = None, frozen: Set[int] = frozenset()) -> None:
        flat = tree.flatten(state)
        # By address: what is kept elsewhere, and only named here. It is not copied.
        self.frozen = {name: t for name, t in flat.tensors.items() if t.numel() and t.data_ptr() in frozen}
        slots = layout.arrange({name: t for name, t in flat.tensors.items() if name not in self.frozen})
        text = json.dumps(flat.structure, separators=(",", ":"), allow_nan=False)
        self.head = layout.head(slots, {"format": "pt", "paceline": "1", "state": text})
        size = slots[-1].end if slots else 0
        devices = {t.device for t in flat.tensors.values() if t.device.type == "cuda"}
        if buffer is None or buffer.numel() < size or (devices and not buffer.is_pinned()):
            buffer = _host_memory(size, pinned=bool(devices))
        self.buffer = buffer
        self._data = buffer[:size]
        self.copies = {s.name: self._data[s.start : s.end].view(s.dtype).view(s.shape) for s in slots}
        for name, place in self.copies.items():
            place.copy_(flat.tensors[name], non_blocking=bool(devices))
        for device in devices:
            torch.cuda.synchronize(device)

    @property
    def nbytes(self) -> int:
        return len(self.head) + self._data.numel()

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file, in order."""
        for whole in (memoryview(self.head), self._data.numpy().data):
            for start in range(0, len(whole), PIECE_BYTES):
                yield whole[start : start + PIECE_BYTES]


def _host_memory(size: int, pinned: bool) -> torch.Tensor:
    try:
        if pinned or size < PIECE_BYTES:
            return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            area.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(area, dtype=torch.uint8)
    except (RuntimeError, OSError):
        raise MemoryError(f"no {size} bytes of host memory for a copy of the state") from None


def pack(state: Any) -> bytes:
    """`state` as bytes for another member: SHA-256, then a safetensors file.

    >>> unpack(pack({"step": 3, "seen": (1, 2)}))
    {'step': 3, 'seen': (1, 2)}
    """
    return seal(b"".join(Snapshot(state).pieces()))


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """The state that `pack` was given; CheckpointError when the bytes are not as they were."""
    body = open_seal(data)
    return read(io.BytesIO(body), len(body))[0]


def seal(body: bytes) -> bytes:
    """A file's bytes with their checksum in front."""
    return hashlib.sha256(body).digest() + body


def open_seal(data: bytes | bytearray | memoryview) -> memoryview:
    """The file's bytes, checked."""
    view = memoryview(data)
    body = view[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != view[:DIGEST_BYTES]:
        raise CheckpointError(f"a packed state of {len(view)} bytes was altered on its way; it is not used")
    return body


def read(file: BinaryIO, size: int, frozen: Mapping[str, torch.Tensor] | None = None) -> tuple[Any, str]:
    """The state in a file of `size` bytes, and the file's SHA-256, taken beside the reading.

    `frozen`: tensors that the state names and another file has.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as beside:  # one thread, so the order of updates is the order of reads

        def fill(whole: memoryview) -> None:
            for start in range(0, len(whole), PIECE_BYTES):
                piece = whole[start : start + PIECE_BYTES]
                at = 0
                while at < len(piece):  # a network disk may give less than was asked for
                    count = file.readinto(piece[at:])  # type: ignore[attr-defined]
                    if not count:
                        raise CheckpointError("it ends before its data does")
                    at += count
                beside.submit(digest.update, piece)

        length = bytearray(8)
        fill(memoryview(length))
        header_bytes = int.from_bytes(length, "little")
        if header_bytes > min(size - 8, layout.MAX_HEADER_BYTES):
            raise CheckpointError(f"its safetensors header of {header_bytes} bytes does not fit in {size} bytes")
        text = bytearray(header_bytes)
        fill(memoryview(text))
        slots, metadata = layout.parse(text, size - 8 - header_bytes)
        tensors = {}
        for slot in slots:
            tensor = torch.empty(slot.shape, dtype=slot.dtype)
            fill(tensor.reshape(-1).view(torch.uint8).numpy().data)
            tensors[slot.name] = tensor
        try:
            structure = json.loads(metadata["state"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"it does not hold a state of Paceline ({error!r})") from None
    return rebuild.unflatten(structure, {**(frozen or {}), **tensors}), digest.hexdigest()
