"""A state comes back exactly: types, bits, sharing; and what cannot is refused by its path."""

from __future__ import annotations

import collections
import functools
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import pack, unpack
from paceline.checkpoint.rebuild import unflatten
from paceline.checkpoint.tree import flatten
from paceline.core.errors import CheckpointError, ConfigError


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, b.is_contiguous()) != (b.dtype, b.shape, True):
            return False
        raw = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*raw)
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            return False
        if getattr(a, "_metadata", None) != getattr(b, "_metadata", None):
            return False
        pairs = zip(a.items(), b.items())
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


def through_json(state: Any) -> Any:
    flat = flatten(state)
    structure = json.loads(json.dumps(flat.structure, allow_nan=False))
    return unflatten(structure, {name: t.contiguous() for name, t in flat.tensors.items()})


TORCH_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]
NUMPY_DTYPES = [
    "f8",
    ">f8",
    "f4",
    "f2",
    "g",
    "c8",
    "c16",
    "i8",
    ">i4",
    "i2",
    "i1",
    "u8",
    "u4",
    "u2",
    "u1",
    "?",
    "S3",
]
NUMPY_DTYPES += ["U3", "M8[ns]", "m8[s]"]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    width = torch.empty((), dtype=dtype).element_size()
    count = math.prod(shape) * width
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        data = bytes(b & 1 for b in data)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    return tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray | np.generic:
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    values = draw(st.lists(st.integers(0, 9), min_size=math.prod(shape), max_size=math.prod(shape)))
    array = np.array(values).astype(dtype).reshape(shape)
    kind = draw(st.integers(0, 3))
    if kind == 0 and array.size:
        return array.reshape(-1)[0]
    if kind == 1:
        array.flags.writeable = False
    return array.T if kind == 2 else array


numbers = st.one_of(st.integers(), st.integers(2**63 - 2, 2**70), st.floats(), st.complex_numbers())
plain = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.text(),
    st.sampled_from(["$tuple", "$", "__metadata__", "a.b", "#2", "\ud800"]),
    st.binary(max_size=20),
    st.binary(min_size=1100, max_size=1200),
    st.binary(max_size=20).map(bytearray),
    st.sampled_from([torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3]), torch.Size([]), np.dtype(">f4")]),
    st.sampled_from([np.str_(""), np.str_("é"), np.bytes_(b""), np.bytes_(b"a"), np.float64("nan"), np.bool_(True)]),
    st.frozensets(st.integers(), max_size=3),
    st.sets(st.text(max_size=2), max_size=3),
    tensors(),
    arrays(),
)
keys = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(None, d)),
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(plain, containers, max_leaves=12))
def test_any_state_comes_back_exactly(state: Any) -> None:
    assert same(state, through_json(state))
    assert same(state, unpack(pack(state)))


def test_one_tensor_under_two_names_is_saved_once_and_stays_one() -> None:
    weight = torch.randn(4, 4)
    state = {
        "embed": weight,
        "head": weight.view(4, 4),
        "half": weight[:2],
        "none": [torch.empty(0), torch.empty(0)],
    }
    flat = flatten(state)
    assert sorted(flat.tensors) == ["embed", "half", "none[0]", "none[1]"]
    again = unpack(pack(state))
    assert again["embed"] is again["head"]
    again["embed"].zero_()
    assert torch.equal(again["half"], weight[:2])


def test_views_that_start_at_one_place_are_told_apart() -> None:
    square, pairs = torch.randn(3, 3), torch.randn(3, dtype=torch.complex64)
    views = [square, square.T, square.view(9), square.view(torch.int32), square[:1], square[:1].T]
    views += [pairs, pairs.conj(), pairs.imag, pairs.conj().imag]
    assert same(views, unpack(pack(views)))


def test_names_that_would_meet_stay_apart() -> None:
    state = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2), "b#2": torch.tensor(3)},
        "__metadata__": torch.tensor(4),
    }
    again = unpack(pack(state))
    assert same(state, again)
    assert flatten({"o": {0: {"x": torch.ones(1)}}}).tensors.keys() == {"o[0].x"}


def test_loaded_tensors_have_aligned_memory_of_their_own() -> None:
    state = [
        torch.ones(3, dtype=torch.uint8),
        torch.randn(5),
        torch.randn(7, dtype=torch.float64),
        torch.randn(3),
    ]
    again = unpack(pack(state))
    assert all(t.data_ptr() % 64 == 0 for t in again)
    assert len({t.untyped_storage().data_ptr() for t in again}) == 4


def test_random_states_of_python_and_numpy() -> None:
    generator = np.random.default_rng(7)
    state = {
        "python": random.getstate(),
        "legacy": np.random.get_state(),
        "mt": np.random.get_state(legacy=False),
        "pcg": generator.bit_generator.state,
    }
    again = unpack(pack(state))
    assert same(state, again)
    fresh = np.random.default_rng()
    fresh.bit_generator.state = again["pcg"]
    assert fresh.random() == generator.random()


def test_versions_of_modules_survive() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    again = unpack(pack({"model": state}))["model"]
    assert again._metadata == state._metadata
    assert same(state, again)


class Counted:
    """An object of the user's that is no plain value."""


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("state", "path", "advice"),
    [
        ({"scheduler": {"lr_lambdas": [len]}}, "scheduler.lr_lambdas[0]", "LambdaLR leaves"),
        ({"a": [1, {"b": Counted()}]}, "a[1].b", "state_dict()"),
        ({"a": {3: {"b": functools.partial(int)}}}, "a[3].b", "state_dict()"),
        ({"p": Point(1, 2)}, "p", "state_dict()"),
        ({"sparse": torch.eye(2).to_sparse()}, "sparse", "to_dense"),
        ({"meta": torch.empty(2, device="meta")}, "meta", "with data"),
        ({"opt": {torch.ones(1): 2}}, "opt", "optimizer.state_dict()"),
        ({"objects": np.array([Counted()])}, "objects", "allowed are"),
        ({"d": defaultdict(lambda: 3)}, "d", "dict(...)"),
        ({"lazy": torch.nn.UninitializedParameter()}, "lazy", "plain tensor"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(state: Any, path: str, advice: str) -> None:
    with pytest.raises(ConfigError) as refused:
        flatten(state)
    assert f"state at {path} " in str(refused.value)
    assert advice in str(refused.value)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {"a": {}}
    state["a"]["back"] = [state]
    with pytest.raises(ConfigError, match=r"state at a\.back\[0\] .*contains itself"):
        flatten(state)
    twice = [1]
    assert through_json([twice, twice]) == [[1], [1]]


@pytest.mark.parametrize(
    "structure",
    [
        {"$tensor": "gone"},
        {"$new": 1},
        {"$dtype": "load"},
        {"$dict": [[[], 1]]},
        {"$float": "xx"},
        {"$defaultdict": [], "$of": "eval"},
        {"$tensor": "w", "$as": "float32", "$shape": [5]},
        {"$int": 3},
    ],
)
def test_a_structure_that_makes_no_sense_is_a_checkpoint_error(structure: Any) -> None:
    with pytest.raises(CheckpointError):
        unflatten(structure, {"w": torch.zeros(8, dtype=torch.uint8)})


def test_packed_bytes_that_change_on_the_way_are_refused() -> None:
    data = pack({"seen": torch.arange(5)})
    for at in range(0, len(data), 7):
        altered = bytearray(data)
        altered[at] ^= 1
        with pytest.raises(CheckpointError, match="altered"):
            unpack(altered)
    with pytest.raises(CheckpointError):
        unpack(data[:-1])
    with pytest.raises(CheckpointError):
        unpack(b"")
