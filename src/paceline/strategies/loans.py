"""Gradients lent out of their buckets: when the last one of a bucket is dropped, its memory goes.

Shared memory outlives the tensors in it, so buckets that are there once would take as much as all gradients for ever,
also on the way forward, when nobody has a gradient. `p.grad` therefore points into a bucket by a tensor of its own for
each pass, with an owner that Python tells the end of: whoever still holds a gradient, or a view of one, holds its
bucket, as with memory of their own; and it does not matter how gradients are dropped. What has begun to fill again is
no longer lent.

Each pass then takes its pages anew, which costs time: it is for strategies whose aim is less memory.
"""

from __future__ import annotations

import os
import threading
import weakref

import torch

from paceline.transport import pages


class Loans:
    """Those of one model."""

    def __init__(self) -> None:
        self._turn = 0
        self._process = os.getpid()  # a fork of it shares the memory, and what it drops is still held here
        self._lock = threading.Lock()  # the last one may be dropped by any thread

    def lend(self, flat: torch.Tensor) -> torch.Tensor:
        """The same memory as another tensor, to be cut into gradients; at the end of a pass."""
        if flat.device.type != "cpu" or not flat.numel():
            return flat
        owner = flat.view(torch.uint8).numpy()
        weakref.finalize(owner, self._dropped, flat, self._turn).atexit = False
        return torch.from_numpy(owner).view(flat.dtype)

    def recall(self) -> None:
        """A pass begins, which fills the buckets."""
        with self._lock:
            self._turn += 1

    def _dropped(self, flat: torch.Tensor, turn: int) -> None:
        # Not blocking: it may run within `recall`, on the same thread; then a pass is about to begin anyway.
        if os.getpid() == self._process and self._lock.acquire(blocking=False):
            try:
                if turn == self._turn:
                    pages.give_back(flat)
            finally:
                self._lock.release()
