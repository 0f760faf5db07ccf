"""Bodies of requests and answers, as JSON and as safetensors: bytes to arrays, checked against the fields, and back.

    {"inputs": [item, item, …]}      or {"inputs": {"x": […], "mask": […]}} where the model takes several arguments
    {"outputs": [row, row, …], "version": 7}

A safetensors body has one tensor per argument, the items along its first dimension; the answer has the outputs, and
the version in its metadata. Nothing of a body is trusted: what does not fit raises Refused with 400 (not readable at
all) or 422 (readable, of another shape or type).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from paceline.checkpoint import layout
from paceline.core.errors import CheckpointError
from paceline.serve.fields import Field
from paceline.serve.refused import Refused

Arrays = tuple[np.ndarray[Any, Any], ...]
_KEPT = 64  # headers of safetensors that were understood before: one who asks often sends the same one
_HEADER_BYTES = 1 << 16


def json_reader(inputs: Sequence[Field], label: Field | None = None) -> Callable[[bytes], Arrays]:
    """What reads a JSON body; with `label`, one that has labels too, which come last."""
    fields = [*inputs, label] if label else list(inputs)
    kind: Any = _nested(inputs[0])
    if len(inputs) > 1:
        kind = msgspec.defstruct("Inputs", [(f.name, _nested(f)) for f in inputs], forbid_unknown_fields=True)
    more = [(label.name, _nested(label))] if label else []
    form = msgspec.defstruct("Body", [("inputs", kind), *more], forbid_unknown_fields=True)
    decode = msgspec.json.Decoder(form).decode
    targets = [(field, field.numpy) for field in fields]

    def read(data: bytes) -> Arrays:
        try:
            body = decode(data)
        except msgspec.ValidationError as error:
            raise Refused(422, f"{error}; wanted: {wanted(fields)}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}") from None
        given = body.inputs  # type: ignore[attr-defined]
        values = [given] if len(inputs) == 1 else [getattr(given, field.name) for field in inputs]
        if label:
            values.append(getattr(body, label.name))
        arrays = []
        for (field, dtype), value in zip(targets, values):
            try:
                with np.errstate(over="ignore"):
                    arrays.append(np.array(value, dtype))
            except (ValueError, OverflowError, TypeError) as error:
                raise Refused(422, f"{field.name}: {error}; wanted: {wanted(fields)}") from None
        return _checked(arrays, fields)

    return read


def safetensors_reader(inputs: Sequence[Field], label: Field | None = None) -> Callable[[bytes], Arrays]:
    """What reads a body of safetensors; with `label`, one that has labels too, which come last."""
    fields = [*inputs, label] if label else list(inputs)
    known: dict[tuple[bytes, int], list[tuple[int, int, np.dtype[Any], tuple[int, ...]]]] = {}

    def places(header: bytes, data_bytes: int) -> list[tuple[int, int, np.dtype[Any], tuple[int, ...]]]:
        try:
            slots = {slot.name: slot for slot in layout.parse(header, data_bytes)[0]}
        except (CheckpointError, RecursionError, OverflowError) as error:
            raise Refused(400, f"the body is not safetensors: {error}") from None
        others = [name for name in slots if not label or name != label.name]
        if len(inputs) == 1 and len(others) == 1:
            slots[inputs[0].name] = slots.pop(others[0])  # there is only one that can be meant
        if set(slots) != {field.name for field in fields}:
            raise Refused(422, f"the body has {sorted(slots)}; wanted: {wanted(fields)}")
        found = []
        for field in fields:
            slot = slots[field.name]
            dtype = field.numpy
            if slot.dtype != field.dtype and layout.DTYPES[slot.dtype] != _NUMPY.get(dtype.name):
                raise Refused(422, f"{field.name} is {str(slot.dtype)[6:]}; wanted: {wanted(fields)}")
            if slot.shape[1:] != field.shape or not slot.shape:
                raise Refused(422, f"{field.name} has shape {list(slot.shape)}; wanted: {wanted(fields)}")
            found.append((slot.start, slot.end, _wire(slot.dtype), slot.shape))
        return found

    def read(data: bytes) -> Arrays:
        size = int.from_bytes(data[:8], "little")
        if len(data) < 8 or size > min(len(data) - 8, _HEADER_BYTES):
            raise Refused(
                400, "the body is not safetensors: it is shorter than its header says, or its header too long"
            )
        header, start = data[8 : 8 + size], 8 + size
        key = (header, len(data))
        if (slots := known.get(key)) is None:
            slots = places(header, len(data) - start)
            if len(known) >= _KEPT:
                known.clear()
            known[key] = slots
        arrays = []
        for begin, _, dtype, shape in slots:
            array = np.frombuffer(data, dtype, _count(shape), start + begin).reshape(shape)
            arrays.append(_from_bf16(array) if dtype == np.uint16 else array)
        return _checked(arrays, fields)

    return read


def json_writer(fields: Sequence[Field]) -> Callable[[Sequence[Any], int], bytes]:
    """What writes an answer as JSON, from lists of rows."""
    encode = msgspec.json.Encoder().encode
    names = [field.name for field in fields]
    if names == ["outputs"]:
        return lambda rows, version: encode({"outputs": rows[0], "version": version})
    return lambda rows, version: encode({"outputs": dict(zip(names, rows)), "version": version})


def safetensors_writer(fields: Sequence[Field]) -> Callable[[Sequence[np.ndarray[Any, Any]], int], bytes]:
    """What writes an answer as safetensors, from arrays."""
    ordered = sorted(range(len(fields)), key=lambda i: -fields[i].numpy.itemsize)  # so that each is aligned
    known: dict[tuple[int, int], bytes] = {}

    def head(items: int, version: int) -> bytes:
        table: dict[str, Any] = {"__metadata__": {"version": str(version)}}
        at = 0
        for i in ordered:
            field = fields[i]
            shape = (items, *field.shape)
            end = at + _count(shape) * field.numpy.itemsize
            table[field.name] = {"dtype": _NUMPY[field.numpy.name], "shape": shape, "data_offsets": (at, end)}
            at = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def write(arrays: Sequence[np.ndarray[Any, Any]], version: int) -> bytes:
        key = (len(arrays[0]), version)
        if key not in known:
            if len(known) >= _KEPT:
                known.clear()
            known[key] = head(*key)
        return known[key] + b"".join(arrays[i].tobytes() for i in ordered)

    return write


def wanted(fields: Sequence[Field]) -> str:
    """
    >>> import torch
    >>> wanted([Field("x", (28, 28), torch.float32)])
    'items along the first dimension, each of x: 28x28 of float32'
    """
    return "items along the first dimension, each of " + ", ".join(map(str, fields))


_NUMPY = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def _nested(field: Field) -> Any:
    kind: Any = field.kind
    for _ in range(len(field.shape) + 1):
        kind = list[kind]
    return kind


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _wire(dtype: Any) -> np.dtype[Any]:
    """Of the bytes: bfloat16 is read as whole numbers first."""
    import torch

    if dtype == torch.bfloat16:
        return np.dtype(np.uint16)
    return torch.empty(0, dtype=dtype).numpy().dtype


def _from_bf16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (array.astype(np.uint32) << 16).view(np.float32)


def _checked(arrays: list[np.ndarray[Any, Any]], fields: Sequence[Field]) -> Arrays:
    items = len(arrays[0]) if arrays[0].ndim else 0
    for array, field in zip(arrays, fields):
        if array.shape[1:] != field.shape or array.ndim != len(field.shape) + 1:
            raise Refused(422, f"{field.name} has shape {list(array.shape)}; wanted: {wanted(fields)}")
        if len(array) != items:
            raise Refused(
                422, f"{field.name} has {len(array)} items and {fields[0].name} {items}: give as many of each"
            )
        if not items:
            raise Refused(422, f"{field.name} has no items; at least one is wanted")
    return tuple(arrays)
