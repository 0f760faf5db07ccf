"""The way back from JSON and named tensors to a state; see tree for how it is coded.

Builds values of the listed types and nothing else: no name in a file is ever imported or called.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.tree import FACTORIES, MAPS, ROWS
from paceline.core.errors import CheckpointError


def unflatten(structure: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The state again; CheckpointError where the two halves do not belong together.

    >>> unflatten({"a": {"$tuple": [1, None]}}, {})
    {'a': (1, None)}
    """
    try:
        return _decode(structure, tensors)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"the structure of a saved state cannot be read: {error!r}") from None


def _decode(coded: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(coded, list):
        return [_decode(v, tensors) for v in coded]
    if not isinstance(coded, dict):
        return coded
    tag = next(iter(coded), "")
    if not tag.startswith("$"):
        return {k: _decode(v, tensors) for k, v in coded.items()}
    body = coded[tag]
    if tag == "$tensor":
        tensor = tensors[body]
        return tensor.view(_dtype(coded["$as"])).reshape(coded["$shape"]) if "$as" in coded else tensor
    if tag == "$array":
        dtype = np.dtype(coded["$as"])
        if dtype.itemsize == 0:  # strings that are all empty
            return np.zeros(coded["$shape"], dtype)
        return tensors[body].numpy().reshape(-1).view(np.uint8).view(dtype).reshape(coded["$shape"])
    if tag in ("$bytes", "$bytearray"):
        data = tensors[coded["$in"]].numpy().tobytes() if "$in" in coded else base64.b64decode(body, validate=True)
        return data if tag == "$bytes" else bytearray(data)
    if tag in MAPS.values():
        return _decode_map(tag, coded, [(_decode(k, tensors), _decode(v, tensors)) for k, v in body], tensors)
    if tag in ROWS.values():
        make = next(kind for kind, known in ROWS.items() if known == tag)
        return make(_decode(v, tensors) for v in body)
    return _decode_scalar(tag, body, coded)


def _decode_map(tag: str, coded: Any, pairs: Iterable[tuple[Any, Any]], tensors: dict[str, torch.Tensor]) -> Any:
    if tag == "$counter":
        return Counter(dict(pairs))
    if tag == "$defaultdict":
        return defaultdict(FACTORIES[coded["$of"]] if "$of" in coded else None, pairs)
    if tag == "$dict":
        return dict(pairs)
    ordered = OrderedDict(pairs)
    if "$metadata" in coded:
        ordered._metadata = _decode(coded["$metadata"], tensors)  # type: ignore[attr-defined]
    return ordered


def _decode_scalar(tag: str, body: Any, coded: Any) -> Any:
    if tag == "$int":
        return int(body, 16)
    if tag == "$float":
        return struct.unpack("<d", bytes.fromhex(body))[0]
    if tag == "$complex":
        return complex(*struct.unpack("<dd", bytes.fromhex(body)))
    if tag == "$npstr":
        return np.str_(body)
    if tag == "$npbytes":
        return np.bytes_(bytes.fromhex(body))
    if tag == "$scalar":
        return np.frombuffer(bytes.fromhex(body), dtype=np.dtype(coded["$as"]))[0]
    if tag == "$dtype":
        return _dtype(body)
    if tag == "$device":
        return torch.device(body)
    if tag == "$npdtype":
        return np.dtype(body)
    raise CheckpointError(f"a saved state uses {tag!r}, which this version of Paceline does not know; use a newer one")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype
