"""Samples as bytes: tensors, numbers and words, in tuples, lists and dicts. Nothing is pickled.

>>> unpack(pack({"x": torch.ones(2), "y": 3}))
{'x': tensor([1., 1.]), 'y': 3}
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

from paceline.core.errors import ConfigError

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}


class _Tensor(msgspec.Struct, frozen=True, tag="t"):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Row(msgspec.Struct, frozen=True, tag="r"):
    items: list[Node]
    fixed: bool  # a tuple


class _Named(msgspec.Struct, frozen=True, tag="d"):
    items: dict[str, Node]


Node = _Tensor | _Row | _Named | bool | int | float | str | None

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Node)


def pack(sample: Any) -> bytes:
    """A sample as bytes; ConfigError where it holds anything else than tensors, numbers, words and rows of them."""
    return _encode(_node(sample))


def unpack(data: bytes) -> Any:
    """The sample; ConfigError where the bytes are none."""
    return _value(_read(data))


def check(data: bytes, like: bytes = b"") -> None:
    """ConfigError where the bytes are no sample, or one of another form than `like`."""
    mine = _form(_read(data))
    if like and mine != (wanted := _form(_read(like))):
        raise ConfigError(f"the run takes samples like {_told(wanted)}, and this one is {_told(mine)}")


def _read(data: bytes) -> Node:
    try:
        node: Node = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"a sample cannot be read: {error}") from None
    return node


def _node(sample: Any) -> Node:
    if isinstance(sample, torch.Tensor):
        name = str(sample.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise ConfigError(f"a sample holds a tensor of {sample.dtype}: known are {', '.join(_DTYPES)}")
        flat = sample.detach().cpu().contiguous().view(-1)
        return _Tensor(name, tuple(sample.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(sample, tuple | list):
        return _Row([_node(each) for each in sample], isinstance(sample, tuple))
    if isinstance(sample, dict) and all(isinstance(key, str) for key in sample):
        return _Named({key: _node(each) for key, each in sample.items()})
    if sample is None or isinstance(sample, bool | int | float | str):
        return sample
    raise ConfigError(
        f"a sample holds a {type(sample).__name__}: give tensors, numbers and words, in tuples, lists and dicts with "
        "names as keys"
    )


def _value(node: Node) -> Any:
    if isinstance(node, _Tensor):
        _form(node)
        if node.dtype == "bool":  # whatever the bytes are
            return torch.tensor(list(node.data), dtype=torch.uint8).view(node.shape) != 0
        flat = torch.frombuffer(bytearray(node.data), dtype=torch.uint8) if node.data else torch.empty(0).byte()
        return flat.view(_DTYPES[node.dtype]).view(node.shape)
    if isinstance(node, _Row):
        values = [_value(each) for each in node.items]
        return tuple(values) if node.fixed else values
    if isinstance(node, _Named):
        return {key: _value(each) for key, each in node.items.items()}
    return node


def _form(node: Node) -> Any:
    """What two samples of one batch have alike: all but the values."""
    if isinstance(node, _Tensor):
        if node.dtype not in _DTYPES or any(n < 0 for n in node.shape):
            raise ConfigError(f"a sample holds a tensor of {node.dtype!r} and shape {list(node.shape)}")
        if math.prod(node.shape) * _DTYPES[node.dtype].itemsize != len(node.data):
            raise ConfigError(f"a sample holds {len(node.data)} bytes for a {node.dtype} tensor {list(node.shape)}")
        return node.dtype, node.shape
    if isinstance(node, _Row):
        return [_form(each) for each in node.items]
    if isinstance(node, _Named):
        return {key: _form(each) for key, each in sorted(node.items.items())}
    return type(node).__name__


def _told(form: Any) -> str:
    """
    >>> _told([("float32", (2, 3)), "int"])
    '(float32[2, 3], int)'
    """
    if isinstance(form, tuple):
        return f"{form[0]}{list(form[1])}"
    if isinstance(form, list):
        return f"({', '.join(map(_told, form))})"
    if isinstance(form, dict):
        return "{" + ", ".join(f"{key}: {_told(each)}" for key, each in form.items()) + "}"
    return str(form)
