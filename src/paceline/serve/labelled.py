"""The body of /learn: inputs as for /predict and a label for each item, made into samples for the run's input queue.

    {"inputs": [item, item, …], "labels": [3, 7, …]}

A body of safetensors has a tensor `labels` beside the inputs. A sample is (input, …, label), as a script's data set
would give it; its form is checked here, so that one who sends another cannot stop a worker. Numbers that are not finite
are refused, and so are classes that the model does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.serve import bodies
from paceline.serve.fields import Field, dtype_of
from paceline.serve.refused import Refused
from paceline.serve.settings import JSON, SAFETENSORS, Settings
from paceline.server.outside.samples import pack

LABELS = "labels"
_MOST_BYTES = 48 << 20  # of one request's samples, as they travel to the parent


class Labelled:
    """Reads bodies once the model's fields are known; before, 503."""

    def __init__(self, settings: Settings) -> None:
        shape, kind = settings.label
        self.label = Field(LABELS, shape, dtype_of("--label", kind))
        self._readers: Mapping[str, Callable[[bytes], bodies.Arrays]] = {}
        self._classes = 0  # 0: labels are no classes

    def ready(self, inputs: Sequence[Field], outputs: Sequence[Field]) -> None:
        self._fields = [*inputs, self.label]
        self._readers = {
            JSON: bodies.json_reader(inputs, self.label),
            SAFETENSORS: bodies.safetensors_reader(inputs, self.label),
        }
        if not self.label.shape and self.label.kind is int and len(outputs) == 1 and len(outputs[0].shape) == 1:
            self._classes = outputs[0].shape[0]

    def samples(self, kind: str, body: bytes) -> list[bytes]:
        """One for each item; Refused: 400, 413, 415, 422, 503."""
        if not self._readers:
            raise Refused(503, "no version is loaded yet: /ready says when", retry_after_s=1)
        kind = kind.partition(";")[0].strip().lower()
        if kind not in self._readers:
            raise Refused(415, f"content-type {kind!r}: {' and '.join(self._readers)} are understood")
        arrays = self._readers[kind](body)
        if sum(array.nbytes + 256 * len(array) for array in arrays) > _MOST_BYTES:
            raise Refused(413, f"the samples take more than {_MOST_BYTES} bytes: send several requests")
        for field, array in zip(self._fields, arrays):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise Refused(422, f"{field.name} has values that are not finite")
        labels = arrays[-1]
        if self._classes and (wrong := labels[(labels < 0) | (labels >= self._classes)]).size:
            raise Refused(422, f"{LABELS}: there is no class {wrong[0]}, the model has {self._classes}")
        return [pack(tuple(map(_value, self._fields, row))) for row in zip(*arrays)]


def _value(field: Field, item: Any) -> Any:
    """Of one item: a tensor in the model's own type, or a plain number where a label has no shape."""
    if field.name == LABELS and not field.shape:
        return item.item()
    return torch.from_numpy(np.array(item)).to(field.dtype)
