"""Any state as plain JSON plus named tensors. `rebuild` is the way back.

A state is what `state_dict()` methods give: nested dicts, lists and tuples that hold tensors, numpy values,
numbers, strings and the like. `flatten` walks it once and copies nothing. No object is ever restored by
running its code, so what is not on the list is refused, by its path within the state.

In the JSON a plain value stands for itself, and everything else is an object whose first key starts with
"$": `{"$tuple": [1, 2]}`, `{"$tensor": "model.weight"}`. A dict with other keys than strings becomes
`$dict`, a list of pairs. Tensors come back on the CPU, contiguous, without gradient; two names of one
tensor stay one tensor; tensors that overlap in part come back apart.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.checkpoint.layout import DTYPES
from paceline.core.errors import ConfigError

MAX_DEPTH = 200  # deeper means that something holds itself in a way that identity does not show
_BYTES_IN_JSON = 1024  # longer byte strings are kept beside the tensors
FACTORIES = {t.__name__: t for t in (int, float, bool, str, list, dict, set, tuple)}
ROWS: dict[type, str] = {
    list: "$list",
    tuple: "$tuple",
    torch.Size: "$size",
    set: "$set",
    frozenset: "$frozenset",
}
MAPS: dict[type, str] = {
    dict: "$dict",
    OrderedDict: "$ordered",
    Counter: "$counter",
    defaultdict: "$defaultdict",
}
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Flat(NamedTuple):
    """A state in two halves."""

    structure: Any  # what json.dumps takes
    tensors: dict[str, torch.Tensor]  # not copied; dtypes that safetensors knows


def flatten(state: Any) -> Flat:
    """Split `state` into JSON and tensors.

    >>> flatten({"lr": 0.1, "betas": (0.9, 0.99), "w": torch.zeros(2)}).structure
    {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.99]}, 'w': {'$tensor': 'w'}}
    """
    walk = _Walk()
    return Flat(walk.encode(state, "", 0), walk.tensors)


class _Walk:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # where a tensor lies -> the name it was first met under
        self._inside: set[int] = set()  # containers that are being walked

    def encode(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)  # exact: a subclass (an enum, a named tuple, numpy.float64) is not its base class
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack("<d", value).hex()}
        if kind in _TENSORS:
            return self._tensor(value, path)
        if kind in ROWS or kind in MAPS:
            return self._container(value, path, depth)
        if kind is complex:
            return {"$complex": struct.pack("<dd", value.real, value.imag).hex()}
        if kind is bytes or kind is bytearray:
            return self._bytes(value, path)
        if kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"$device": str(value)}
        if kind is np.str_:
            return {"$npstr": str(value)}
        if kind is np.bytes_:
            return {"$npbytes": bytes(value).hex()}
        if isinstance(value, np.generic) and value.dtype.kind in "biufcMm":
            return {"$scalar": value.tobytes().hex(), "$as": value.dtype.str}
        if kind is np.ndarray and value.dtype.kind in "biufcSUMm":
            return self._array(value, path)
        if isinstance(value, np.dtype) and value.names is None:
            return {"$npdtype": value.str}
        raise ConfigError(_refusal(value, path))

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if id(value) in self._inside or depth > MAX_DEPTH:
            raise ConfigError(
                f"state at {path or 'the top'} cannot be saved: it contains itself or is nested deeper than "
                f"{MAX_DEPTH}; leave out the reference back to the object that holds it"
            )
        self._inside.add(id(value))
        kind = type(value)
        if kind in ROWS:
            items = [self.encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
            coded: Any = items if kind is list else {ROWS[kind]: items}
        else:
            coded = self._mapping(value, path, depth)
        self._inside.discard(id(value))
        return coded

    def _mapping(self, value: Any, path: str, depth: int) -> Any:
        pairs = []
        for key, item in value.items():
            if isinstance(key, torch.Tensor):
                raise ConfigError(
                    f"state at {path or 'the top'} has a tensor as a key, which means nothing in another "
                    "process; save optimizer.state_dict(), which numbers the parameters, not optimizer.state"
                )
            below = _below(path, key)
            pairs.append([self.encode(key, below, depth + 1), self.encode(item, below, depth + 1)])
        if type(value) is dict and all(type(k) is str and not k.startswith("$") for k in value):
            return dict(pairs)
        coded: dict[str, Any] = {MAPS[type(value)]: pairs}
        if type(value) is defaultdict and value.default_factory is not None:
            factory = getattr(value.default_factory, "__name__", "")
            if FACTORIES.get(factory) is not value.default_factory:
                known = ", ".join(FACTORIES)
                raise ConfigError(
                    f"state at {path or 'the top'} is a defaultdict of {value.default_factory!r}, which "
                    f"cannot be saved; use one of {known}, or save dict(...) of it"
                )
            coded["$of"] = factory
        if type(value) is OrderedDict and hasattr(value, "_metadata"):  # versions of modules, by nn.Module.state_dict
            coded["$metadata"] = self.encode(value._metadata, f"{path}._metadata", depth + 1)
        return coded

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            raise ConfigError(
                f"state at {path or 'the top'} is a tensor of layout {value.layout} on {value.device}; only "
                "dense tensors with data can be saved: convert it, e.g. with .to_dense() or .dequantize()"
            )
        value = value.detach()
        if value.dtype in DTYPES:
            return {"$tensor": self._name(value, path)}
        # a type that the file format does not know travels as its bytes
        flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
        name = self._name(flat.view(torch.uint8), path)
        return {"$tensor": name, "$as": str(value.dtype).removeprefix("torch."), "$shape": list(value.shape)}

    def _array(self, value: np.ndarray[Any, Any], path: str) -> dict[str, Any]:
        about = {"$as": value.dtype.str, "$shape": list(value.shape)}
        if not (value.flags.c_contiguous and value.flags.writeable):
            value = value.copy(order="C")
        if value.dtype.kind in "biufc" and value.dtype.isnative and value.dtype != np.longdouble:
            try:
                tensor = torch.from_numpy(value)
            except TypeError:  # a type that torch lacks
                tensor = None
            if tensor is not None and tensor.dtype in DTYPES:
                return {"$array": self._name(tensor, path), **about}
        raw = np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8)
        return {"$array": self._name(torch.from_numpy(raw), path), **about}

    def _bytes(self, value: bytes | bytearray, path: str) -> dict[str, Any]:
        tag = "$bytes" if type(value) is bytes else "$bytearray"
        if len(value) <= _BYTES_IN_JSON:
            return {tag: base64.b64encode(value).decode()}
        raw = torch.from_numpy(np.frombuffer(bytearray(value), dtype=np.uint8))
        return {tag: "", "$in": self._name(raw, path)}

    def _name(self, tensor: torch.Tensor, path: str) -> str:
        place = (
            tensor.data_ptr(),
            str(tensor.device),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if tensor.numel() and place in self._names:
            return self._names[place]
        name = path if path not in ("", "__metadata__") else f"value{path}"
        count = 1
        while name in self.tensors:  # {"a.b": x, "a": {"b": y}}
            count += 1
            name = f"{path}#{count}"
        self.tensors[name] = tensor
        self._names[place] = name
        return name


def _below(path: str, key: Any) -> str:
    if type(key) is str:
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def _refusal(value: Any, path: str) -> str:
    kind = type(value)
    start = f"state at {path or 'the top'} cannot be saved: it is {kind.__module__}.{kind.__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"{start}; save the plain tensor that it stands for, e.g. .full_tensor() of a DTensor"
    if callable(value):
        return (
            f"{start}, and code is never put into a checkpoint; leave it out of state_dict() (LambdaLR "
            "leaves functions out by itself), or use an object that holds its numbers as attributes"
        )
    return (
        f"{start}; allowed are dicts, lists, tuples, sets, tensors, numpy values, numbers, strings, bytes "
        "and None: give the object a state_dict() of these and a load_state_dict()"
    )
