"""Putting a batch onto the device of the member, ahead of use.

In the background thread, `Ahead.send` pins the batch and copies it on a stream of its own; `Ahead.receive`,
in the training thread, lets the training stream wait for that copy and tells the allocator who uses the
memory. On CPU there is nothing to do. Assumes that a batch is made of tensors, lists, tuples, dicts, and
objects that have `to`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def each_tensor(batch: Any, do: Callable[[Any], Any]) -> Any:
    """The batch with `do` applied to every tensor (and every object that has `to`) in it.

    >>> each_tensor({"x": [torch.ones(1)], "n": 3}, lambda t: t + 1)
    {'x': [tensor([2.])], 'n': 3}
    """
    if isinstance(batch, Tensor) or hasattr(batch, "to"):
        return do(batch)
    if isinstance(batch, Mapping):
        return {key: each_tensor(value, do) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(each_tensor(value, do) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(each_tensor(value, do) for value in batch)
    return batch


class Here:
    """Copies in the thread that trains, on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def put(self, batch: Any) -> Any:
        return each_tensor(batch, self._put)

    def _put(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part.to(self.device)
        if self.device.type == "cuda" and part.device.type == "cpu":
            part = part.pin_memory()  # from ordinary memory the copy would block this thread
        return part.to(self.device, non_blocking=True)


class Ahead:
    """Copies in the background thread, on a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._here = Here(device)

    def send(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """Start the copy; returns the batch on the device and the event that says it has arrived."""
        with torch.cuda.stream(self.stream):  # also makes the device current in this thread
            moved = each_tensor(batch, lambda part: self._here.put(part) if _recordable(part) else part)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self.stream)
        return moved, arrived

    def receive(self, moved: Any, arrived: torch.cuda.Event) -> Any:
        """Make what the training stream does next wait for the copy."""
        training = torch.cuda.current_stream(self.device)
        training.wait_event(arrived)

        def use(part: Any) -> Any:
            if not _recordable(part):
                return self._here.put(part)
            # The memory belongs to the copy stream: it must not be given out again while training reads it.
            part.record_stream(training)
            return part

        return each_tensor(moved, use)


def _recordable(part: Any) -> bool:
    """Whether the allocator can be told who uses this; else it is copied in the training thread only."""
    return hasattr(part, "record_stream")
