"""Bodies: what fits is read exactly, what does not is refused with a reason, and nothing else ever happens."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from paceline.serve import bodies
from paceline.serve.fields import Field
from paceline.serve.refused import Refused

ONE = [Field("x", (2, 3), torch.float32)]
TWO = [Field("words", (4,), torch.int64), Field("weight", (), torch.float32)]


def test_json_and_safetensors_say_the_same() -> None:
    x = torch.rand(5, 2, 3)
    by_json = bodies.json_reader(ONE)(json.dumps({"inputs": x.tolist()}).encode())
    by_tensor = bodies.safetensors_reader(ONE)(save({"x": x}))
    assert np.array_equal(by_json[0], x.numpy())
    assert np.array_equal(by_tensor[0], x.numpy())
    words, weight = torch.arange(8).view(2, 4), torch.rand(2)
    for arrays in (
        bodies.json_reader(TWO)(json.dumps({"inputs": {"words": words.tolist(), "weight": weight.tolist()}}).encode()),
        bodies.safetensors_reader(TWO)(save({"words": words, "weight": weight})),
    ):
        assert np.array_equal(arrays[0], words.numpy())
        assert np.array_equal(arrays[1], weight.numpy())


def test_bfloat16_comes_in() -> None:
    x = torch.rand(1, 2, 3).to(torch.bfloat16)
    assert np.array_equal(
        bodies.safetensors_reader([Field("x", (2, 3), torch.bfloat16)])(save({"x": x}))[0], x.float().numpy()
    )


def test_answers() -> None:
    fields = [Field("mean", (2,), torch.float32), Field("count", (), torch.int64)]
    arrays = [np.array([[1.5, 2], [3, 4]], np.float32), np.array([7, 8])]
    data = bodies.safetensors_writer(fields)(arrays, 12)
    tensors = load(data)
    assert torch.equal(tensors["mean"], torch.tensor([[1.5, 2], [3, 4]]))
    assert torch.equal(tensors["count"], torch.tensor([7, 8]))
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"] == {"version": "12"}
    text = bodies.json_writer(fields)([a.tolist() for a in arrays], 12)
    assert json.loads(text) == {"outputs": {"mean": [[1.5, 2], [3, 4]], "count": [7, 8]}, "version": 12}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 422),
        (b"[1]", 422),
        (b"{}", 422),
        (b'{"inputs": []}', 422),
        (b'{"inputs": [[]]}', 422),
        (b'{"inputs": [[[1, 2, 3]]]}', 422),
        (b'{"inputs": [[[1, 2, 3], [1, 2]]]}', 422),
        (b'{"inputs": [[[1, 2, 3], [1, 2, "3"]]]}', 422),
        (b'{"inputs": [[[1, 2, 3], [1, 2, null]]]}', 422),
        (b'{"inputs": [[[[1, 2, 3], [1, 2, 3]]]]}', 422),
        (b'{"inputs": [[[1, 2, 3], [1, 2, 3]]], "more": 1}', 422),
    ],
)
def test_json_that_does_not_fit(text: bytes, status: int) -> None:
    with pytest.raises(Refused) as refused:
        bodies.json_reader(ONE)(text)
    assert refused.value.status == status, refused.value.why


def test_whole_numbers_that_are_too_large() -> None:
    for number in ("9223372036854775808", "1" + "0" * 400, "1.5", "true"):
        with pytest.raises(Refused) as refused:
            bodies.json_reader(TWO)(f'{{"inputs": {{"words": [[1, 2, 3, {number}]], "weight": [1]}}}}'.encode())
        assert refused.value.status in (400, 422)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"x": torch.zeros(1, 2, 2)}, "shape"),
        ({"x": torch.zeros(2, 3)}, "shape"),
        ({"x": torch.zeros(0, 2, 3)}, "at least one"),
        ({"x": torch.zeros(1, 2, 3, dtype=torch.float64)}, "float64"),
        ({"x": torch.zeros(1, 2, 3), "y": torch.zeros(1)}, "wanted"),
    ],
)
def test_safetensors_that_do_not_fit(tensors: dict[str, torch.Tensor], why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        bodies.safetensors_reader(ONE)(save(tensors))
    assert refused.value.status == 422


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["inputs", "words", "x", ""]), inner),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(
    body=st.binary(max_size=60) | VALUES | st.fixed_dictionaries({"inputs": VALUES}), fields=st.sampled_from([ONE, TWO])
)
def test_anything_as_json_is_read_or_refused(body: Any, fields: list[Field]) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    _read_or_refused(bodies.json_reader(fields), data, fields)


GOOD = {
    id(ONE): save({"x": torch.rand(2, 2, 3)}),
    id(TWO): save({"words": torch.ones(2, 4).long(), "weight": torch.ones(2)}),
}


@settings(max_examples=300, deadline=None)
@given(
    fields=st.sampled_from([ONE, TWO]),
    changes=st.lists(st.tuples(st.integers(0, 220), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 30),
    more=st.binary(max_size=12),
)
def test_safetensors_with_changed_bytes_are_read_or_refused(
    fields: list[Field], changes: list[tuple[int, int]], cut: int, more: bytes
) -> None:
    data = bytearray(GOOD[id(fields)])
    for at, value in changes:
        data[at % len(data)] = value
    _read_or_refused(bodies.safetensors_reader(fields), bytes(data[: len(data) - cut] + more), fields)


def _read_or_refused(read: Any, data: bytes, fields: list[Field]) -> None:
    try:
        arrays = read(data)
    except Refused as refused:
        status = refused.status
        msgspec.json.encode(refused.why)  # a reason that can be sent
    else:
        status = 0
        items = len(arrays[0])
        assert items
        assert [array.shape for array in arrays] == [(items, *field.shape) for field in fields]
    assert status in (0, 400, 422)
