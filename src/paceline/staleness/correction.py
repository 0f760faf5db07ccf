"""What a correction is: what a shard of the parameter server does with gradients that are old.

    accepts   a push arrives: whether it is applied at all
    on_push   for each piece of it: gradient → the gradient to apply
    on_pull   for each piece that a worker asks for: weights → what it is sent

A piece is a flat tensor of floating-point numbers, a slice of a shard, and its key always names the same slice. All of
it is in one parameter group. State stands in the correction, by key and where needed by worker. A piece that a push has
no gradient for is left alone: `on_push` is not called. A shard calls from one thread, without gradients recorded,
and sees to it that what reaches `on_push` is finite.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from paceline.core.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """What a correction may know of a push."""

    worker: int  # its rank, or where it has threads, a number for each
    age: int  # versions of the shard between what the worker read and now
    lr: float  # that came with it, of the piece's parameter group; where no piece is meant, the largest


class Stage(enum.IntEnum):
    """What a correction makes of a gradient. In a chain each stage may stand once, and later ones stand behind."""

    BESIDE = 0  # nothing: it may stand anywhere
    ESTIMATE = 1  # what the gradient would be at the present weights; needs the gradient as the worker computed it
    SCALE = 2  # less of it
    GATHER = 3  # a sum over pushes; what a worker is sent counts on all of that being applied


@runtime_checkable
class Correction(Protocol):
    """The contract of all corrections."""

    @property
    def words(self) -> str:
        """How a user writes it, such as "drop(age=8)"."""

    @property
    def stage(self) -> Stage:
        """Where it may stand in a chain."""

    @property
    def reads(self) -> bool:
        """Whether `on_pull` must be called; where not, a worker is sent the weights as they are."""

    def check_optimizer(self, options: Mapping[str, Any]) -> None:
        """Look at the options of the shard's optimizer, one of its `param_groups`.

        Raises:
            ConfigError: the optimizer does what this correction does, or spoils it.
        """

    def accepts(self, push: Push) -> bool:
        """False: the whole push is dropped and reported, and nothing of it is applied.

        Raises:
            ConfigError: at this learning rate the correction makes no sense.
        """

    def on_pull(self, key: str, weights: torch.Tensor, worker: int, lr: float) -> torch.Tensor:
        """What the worker is sent for this piece: `weights` itself, which is not modified, or another tensor."""

    def on_push(self, key: str, grad: torch.Tensor, weights: torch.Tensor, push: Push) -> torch.Tensor:
        """The gradient to apply: `grad`, modified in place. Only weight decay modifies `weights`."""

    def forget(self, worker: int) -> None:
        """A worker has left: release what is kept for it. It may come back, and then begins anew."""

    def state_dict(self) -> dict[str, Any]:
        """Dicts and lists of tensors, numbers and words. The tensors are those in use: save or copy them at once."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on bit for bit where another one with the same words was; tensors are copied.

        Raises:
            CheckpointError: the state is of another correction.
        """


def check_state(state: Mapping[str, Any], name: str) -> None:
    """Refuse the state of another correction."""
    if (saved := state.get("correction")) != name:
        raise CheckpointError(
            f"the checkpoint has the state of {saved!r} where that of {name!r} belongs. Resume with the corrections "
            "that the run was started with, in the same order, or without the state of corrections"
        )
