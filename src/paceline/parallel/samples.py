"""What of a batch is cut into micro-batches, and what all of them get whole.

Samples are the rows of the first input, and every tensor with as many rows is cut along with it. The first batch
decides for all: what was cut there has samples in its rows, what was not has none, whatever later batches look like.
One batch cannot tell a tensor that has by chance as many rows as there are samples; `run.model(whole=...)` can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from paceline.core.errors import ConfigError, nearest
from paceline.parallel.nested import each


class Micro(NamedTuple):
    """A piece of a batch."""

    inputs: list[Any]
    target: Any
    share: float  # of the batch's samples


class Samples:
    """Cuts the batches of one model.

    Args:
        names: of the model's inputs.
        whole: those of them that have no samples in their rows; None: nobody has said.
        tell: to the person who watches.
    """

    def __init__(
        self,
        names: Sequence[str],
        whole: Sequence[str] | None = None,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        for name in whole or ():
            if name not in names:
                raise ConfigError(f"run.model(whole=[{name!r}]) is no input of the model: {nearest(name, list(names))}")
        if whole and names[0] in whole:
            raise ConfigError(
                f"run.model(whole=[{names[0]!r}]): batches are cut along the rows of the model's first input; let "
                "another one come first"
            )
        self._names, self._whole, self._tell = list(names), whole, tell
        self._cut: list[bool] = []  # in the first batch: tensor by tensor

    def count(self, inputs: Sequence[Any]) -> int:
        """How many samples a batch has."""
        first = next((t for value in inputs for t in tensors(value) if t.ndim), None)
        if first is None or not len(first):
            raise ConfigError(
                "run.backward(model, *inputs, target, loss=...): the first input must be a tensor with a sample in "
                "each row"
            )
        return len(first)

    def split(self, inputs: Sequence[Any], target: Any, micros: int) -> list[Micro]:
        """Pieces of a batch, as equal as can be.

        >>> x, mask, y = torch.zeros(3, 2), torch.ones(3, 3), torch.zeros(3)
        >>> batch = Samples(["x", "mask"], whole=["mask"]).split([x, mask], y, 2)
        >>> [(*(tuple(t.shape) for t in micro.inputs), len(micro.target), round(micro.share, 2)) for micro in batch]
        [((2, 2), (3, 3), 2, 0.67), ((1, 2), (3, 3), 1, 0.33)]
        """
        count = self.count(inputs)
        cut = self._settle(inputs, target, count)
        size, more = divmod(count, micros)
        found, begin = [], 0
        for number in range(micros):
            length = size + (number < more)
            rows = slice(begin, begin + length) if length else slice(0, 1)
            begin += length
            at = iter(cut)

            def part(tensor: torch.Tensor, rows: slice = rows, at: Any = at) -> torch.Tensor:
                return tensor[rows] if next(at) else tensor

            found.append(Micro([each(value, part) for value in inputs], each(target, part), length / count))
        return found

    def _settle(self, inputs: Sequence[Any], target: Any, count: int) -> list[bool]:
        """Whether each tensor of a batch is cut; what the first one had decides."""
        of = [(self._names[place], t) for place, value in enumerate(inputs) for t in tensors(value)]
        of += [("the target", t) for t in tensors(target)]
        fits = [bool(t.ndim) and len(t) == count and name not in (self._whole or ()) for name, t in of]
        if not self._cut:
            self._cut = fits
            self._doubt(of, count)
        if len(self._cut) != len(fits):  # batches of another structure
            return fits
        for (name, tensor), now, before in zip(of, fits, self._cut):
            if before and not now:
                way = "make it a part of the loss" if name == "the target" else f"run.model(model, whole=[{name!r}])"
                raise ConfigError(
                    f"run.backward: {name} has shape {tuple(tensor.shape)} in a batch of {count} samples, and was cut "
                    "with the first batch, where it had a row for each sample. If it is for all samples, not one row "
                    f"each: {way}"
                )
        return self._cut

    def _doubt(self, of: Sequence[tuple[str, torch.Tensor]], count: int) -> None:
        """A square as long as the batch may be a mask of all pairs of something else."""
        for name, tensor in of[1:] if self._whole is None and count > 1 else ():
            if name != "the target" and tensor.shape[:2] == (count, count):
                self._tell(
                    f"run.backward: {name} has shape {tuple(tensor.shape)} and is cut into micro-batches, since the "
                    f"batch has {count} samples. If it is for all samples: run.model(model, whole=[{name!r}]); if not, "
                    "whole=[] says so"
                )


def tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    each(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found
