"""Computes one batch: rows into buffers that were allocated before, one forward pass, rows out.

Called by the batcher, in one thread. Before each batch the newest version is installed (`swap`), so that every row of a
batch is made by one version, which the answers name. `warm` runs every size that can come, so that no request pays for
a kernel that is made for a new shape.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from paceline.core.errors import ConfigError
from paceline.serve.bodies import Arrays
from paceline.serve.fields import Field, flat, outputs_of
from paceline.serve.refused import Refused

_REPEATS = 5


class Installs(Protocol):
    """Puts the newest version into the model; its number."""

    def install(self) -> int: ...


class Engine:
    """`forward` takes one tensor per field, with up to `most` items, and returns what the model does."""

    def __init__(
        self,
        forward: Callable[..., Any],
        inputs: Sequence[Field],
        swap: Installs,
        most: int,
        *,
        device: torch.device | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._forward = forward
        self._swap = swap
        self.most = most
        self.version = 0  # that made the last batch
        self.swaps = 0
        self.inputs = list(inputs)
        self.outputs: list[Field] = []
        self._device = device or torch.device("cpu")
        self._buffers = [torch.zeros((most, *field.shape), dtype=_held(field.dtype)) for field in inputs]
        self._lie = {buffer.untyped_storage().data_ptr() for buffer in self._buffers}
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        fitting = {n: n for n in range(1, most + 1)} if not sizes else _fitting(sizes, most)
        self._size_for = fitting  # how many items are computed for so many; a form may know a few sizes only
        self._views = {n: [buffer[:n] for buffer in self._buffers] for n in set(fitting.values())}

    def run(self, batch: Sequence[Arrays], rows: Sequence[int]) -> tuple[list[Rows], int]:
        """The outputs of each request of the batch, and the version that made them all."""
        version = self._swap.install()
        if version != self.version:
            self.swaps += bool(self.version)
            self.version = version
        at = 0
        for arrays, n in zip(batch, rows):
            for place, array in zip(self._arrays, arrays):
                place[at : at + n] = array
            at += n
        for place in self._arrays:
            place[at : self._size_for[at]] = 0  # what a request before has left there is not for this batch to compute
        outputs = self._compute(at)
        results = []
        begin = 0
        for n in rows:
            results.append(Rows(outputs, begin, begin + n))
            begin += n
        return results, version

    def warm(self) -> float:
        """Run every size; the seconds that the largest takes, in the median."""
        self.version = self._swap.install()
        with torch.inference_mode():
            size = self._size_for[1]
            self.outputs = outputs_of(self._made(size), size)
        try:
            for size in sorted(self._views):
                self._compute(size)
            times = []
            for _ in range(_REPEATS):
                began = time.perf_counter()
                self._compute(self.most)
                times.append(time.perf_counter() - began)
        except Refused as refused:
            raise ConfigError(f"batches of zeros, of 1 to {self.most} items: {refused.why}") from None
        return statistics.median(times)

    def _compute(self, items: int) -> Outputs:
        try:
            with torch.inference_mode():
                size = self._size_for[items]
                made = flat(self._made(size))
                for field in self.outputs:
                    _check(field, made.get(field.name), size)
                arrays = [self._array(made[field.name], items) for field in self.outputs]
        except torch.OutOfMemoryError as error:
            raise Refused(503, f"out of memory: {error}", retry_after_s=1) from None
        except torch.AcceleratorError as error:
            _end(error)
        except Refused:
            raise
        except Exception as error:  # the user's code, and zeros have passed: it is what this request holds
            raise Refused(422, f"the model cannot compute this: {type(error).__name__}: {error}") from None
        return Outputs(arrays)

    def _made(self, size: int) -> Any:
        """What the model makes of what lies in the buffers."""
        views = self._views[size]
        return self._forward(*(views if self._device.type == "cpu" else [view.to(self._device) for view in views]))

    def _array(self, value: torch.Tensor, items: int) -> np.ndarray[Any, Any]:
        value = value[:items]
        if value.dtype == torch.bfloat16:
            value = value.float()
        elif value.untyped_storage().data_ptr() in self._lie:  # a part of its input: the next batch would write over it
            value = value.clone()
        array: np.ndarray[Any, Any] = value.cpu().numpy()
        return array


class Outputs:
    """What a batch came to; as lists only if somebody wants JSON, and then once for all of its requests."""

    __slots__ = ("_lists", "arrays")

    def __init__(self, arrays: list[np.ndarray[Any, Any]]) -> None:
        self.arrays = arrays
        self._lists: list[list[Any]] | None = None

    @property
    def lists(self) -> list[list[Any]]:
        if self._lists is None:
            self._lists = [array.tolist() for array in self.arrays]
        return self._lists


class Rows:
    """One request's part of a batch."""

    __slots__ = ("_begin", "_end", "_outputs")

    def __init__(self, outputs: Outputs, begin: int, end: int) -> None:
        self._outputs, self._begin, self._end = outputs, begin, end

    def lists(self) -> list[list[Any]]:
        return [rows[self._begin : self._end] for rows in self._outputs.lists]

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        return [array[self._begin : self._end] for array in self._outputs.arrays]


def _end(error: Exception) -> NoReturn:
    """A GPU that has met an index that is not there computes nothing more for this process: another one has to."""
    print(f"paceline serve: a replica has lost its GPU: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _check(field: Field, value: Any, size: int) -> None:
    """Rows are cut out by number: a model that leaves some out for some values would give one the rows of another."""
    if isinstance(value, torch.Tensor) and value.shape == (size, *field.shape) and value.dtype == field.dtype:
        return
    found = f"{list(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise Refused(
        422,
        f"of these values the model makes {field.name!r} with {found}, and not {[size, *field.shape]} of {field.dtype}",
    )


def _held(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _fitting(sizes: Sequence[int], most: int) -> dict[int, int]:
    if max(sizes) < most:
        raise ConfigError(f"sizes {list(sizes)} must reach {most}")
    return {n: min(size for size in sizes if size >= n) for n in range(1, most + 1)}
