"""How tensors lie in a safetensors file: eight bytes of length, a JSON header, then the data without holes.

The format is written and read here, and not by its library, for two reasons: a snapshot in memory then has
the layout of the file's data, so that writing it is one stream from one buffer; and every tensor is read
into memory of its own, aligned as torch aligns it (matrix products may differ in the last bit with the
alignment of their inputs). Any safetensors reader opens the files. Numbers are little-endian, as on every
machine that torch runs on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from paceline.core.errors import CheckpointError, ConfigError

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_NAMES = {name: dtype for dtype, name in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's other readers


class Slot(NamedTuple):
    """Where one tensor lies, in bytes from the start of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def arrange(tensors: Mapping[str, torch.Tensor]) -> list[Slot]:
    """Give each tensor its place: wide types first, so that each is aligned to its own width without holes.

    >>> slots = arrange({"a": torch.zeros(3, dtype=torch.bool), "b": torch.zeros(2)})
    >>> [(slot.name, slot.start, slot.end) for slot in slots]
    [('b', 0, 8), ('a', 8, 11)]
    """
    slots = []
    start = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        end = start + tensor.numel() * tensor.element_size()
        slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), start, end))
        start = end
    return slots


def head(slots: list[Slot], metadata: Mapping[str, str]) -> bytes:
    """Length and header, up to the first byte of the data."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    for slot in slots:
        offsets = [slot.start, slot.end]
        table[slot.name] = {"dtype": DTYPES[slot.dtype], "shape": list(slot.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigError(
            f"the state has {len(text)} bytes outside its tensors, {MAX_HEADER_BYTES} are allowed; "
            "keep long lists of numbers as tensors or numpy arrays"
        )
    return len(text).to_bytes(8, "little") + text


def parse(text: bytes | bytearray, data_bytes: int) -> tuple[list[Slot], dict[str, str]]:
    """Slots and metadata of a header; CheckpointError if it does not fit the `data_bytes` after it."""
    try:
        table = json.loads(text)
        metadata = table.pop("__metadata__", {})
        slots = [
            Slot(
                name,
                _NAMES[entry["dtype"]],
                tuple(map(int, entry["shape"])),
                *map(int, entry["data_offsets"]),
            )
            for name, entry in table.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its safetensors header cannot be read ({error!r})") from None
    slots.sort(key=lambda slot: (slot.start, slot.end))
    at = 0
    for slot in slots:
        size = math.prod(slot.shape) * slot.dtype.itemsize
        if slot.start != at or slot.end != at + size or any(n < 0 for n in slot.shape):
            raise CheckpointError(f"its safetensors header gives {slot.name!r} a place that does not fit")
        at = slot.end
    if at != data_bytes:
        raise CheckpointError(f"its safetensors header describes {at} bytes of data, there are {data_bytes}")
    return slots, metadata
