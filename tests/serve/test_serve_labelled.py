"""Bodies of /learn become samples as the run's own loader would see them, or are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save

from paceline.serve.fields import Field
from paceline.serve.labelled import Labelled
from paceline.serve.refused import Refused
from paceline.serve.settings import JSON, SAFETENSORS, Settings
from paceline.server.outside.samples import check, pack, unpack

X = Field("x", (2,), torch.float32)
MASK = Field("mask", (), torch.int64)
CLASSES = Field("outputs", (3,), torch.float32)


def labelled(*inputs: Field, label: Any = ((), "int64"), outputs: Field = CLASSES) -> Labelled:
    made = Labelled(Settings(model="", label=label))
    made.ready(inputs or [X], [outputs])
    return made


def samples(reader: Labelled, body: Any) -> list[Any]:
    return [unpack(sample) for sample in reader.samples(JSON, json.dumps(body).encode())]


def test_a_sample_is_what_a_script_takes_by_like() -> None:
    body = {"inputs": [[1, 2], [3, 4]], "labels": [0, 2]}
    packed = labelled().samples(JSON, json.dumps(body).encode())
    for sample in packed:
        check(sample, pack((torch.zeros(2), 0)))
    (x, y), (_, last) = map(unpack, packed)
    assert torch.equal(x, torch.tensor([1.0, 2.0]))
    assert (y, last) == (0, 2)


def test_several_inputs_come_in_the_order_of_the_model() -> None:
    body = {"inputs": {"x": [[1, 2]], "mask": [5]}, "labels": [1]}
    ((x, mask, y),) = samples(labelled(X, MASK), body)
    assert torch.equal(x, torch.tensor([1.0, 2.0]))
    assert torch.equal(mask, torch.tensor(5))
    assert y == 1


def test_labels_with_a_shape_are_tensors() -> None:
    ((_, y),) = samples(labelled(label=((2,), "float32")), {"inputs": [[1, 2]], "labels": [[0.5, 7]]})
    assert torch.equal(y, torch.tensor([0.5, 7.0]))


def test_safetensors_and_json_make_the_same_samples() -> None:
    body = {"inputs": [[1, 2], [3, 4]], "labels": [0, 2]}
    raw = save({"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "labels": torch.tensor([0, 2])})
    assert labelled().samples(SAFETENSORS, raw) == labelled().samples(JSON, json.dumps(body).encode())
    named = save(
        {"picture": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "labels": torch.tensor([0, 2])}
    )  # as /predict does
    assert labelled().samples(SAFETENSORS, named) == labelled().samples(SAFETENSORS, raw)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (422, {"inputs": [[1, 2]]}, "labels"),
        (422, {"inputs": [[1, 2]], "labels": [0, 1]}, "labels has 2 items and x 1: give as many of each"),
        (422, {"inputs": [[1, 2]], "labels": [3]}, "no class 3, the model has 3"),
        (422, {"inputs": [[1, 2]], "labels": [-1]}, "no class -1"),
        (422, {"inputs": [[1, 2]], "labels": [0.5]}, "wanted"),
        (422, {"inputs": [[1, 1e39]], "labels": [0]}, "x has values that are not finite"),
        (422, {"inputs": [[1, 2, 3]], "labels": [0]}, "shape"),
        (422, {"inputs": [], "labels": []}, "shape [0]"),
        (422, {"inputs": [[1, 2]], "labels": [0], "more": 1}, "more"),
    ],
)
def test_what_does_not_fit_is_refused(status: int, body: Any, words: str) -> None:
    with pytest.raises(Refused) as refused:
        samples(labelled(), body)
    assert refused.value.status == status
    assert words in refused.value.why


def test_other_labels_than_classes_have_no_range() -> None:
    ((_, y),) = samples(labelled(outputs=Field("outputs", (), torch.float32)), {"inputs": [[1, 2]], "labels": [99]})
    assert y == 99


def test_before_the_model_is_known_and_for_other_kinds() -> None:
    with pytest.raises(Refused, match="no version is loaded") as refused:
        Labelled(Settings(model="")).samples(JSON, b"{}")
    assert refused.value.status == 503
    with pytest.raises(Refused, match="understood") as refused:
        labelled().samples("text/csv", b"1,2,0")
    assert refused.value.status == 415
