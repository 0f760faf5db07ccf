"""Puts the shelf's current version into a model between two batches."""

from __future__ import annotations

import threading
import time

import torch
from torch import nn

from paceline.serve.shelf import Shelf

_LOOK_S = 0.05


class Swap:
    """A thread loads the current version into spare tensors; `install` exchanges them with the model's."""

    def __init__(self, model: nn.Module, shelf: Shelf, *, cast: bool = False) -> None:
        self._state = model.state_dict(keep_vars=True)
        self._shelf = shelf
        self._installed = 0
        self._loaded: tuple[int, dict[str, torch.Tensor]] | None = None
        threading.Thread(target=self._load, name="swap", daemon=True).start()

    def install(self) -> int:
        """The number of the version that is in the model now; 0: none yet."""
        loaded = self._loaded
        if loaded is not None:
            self._installed, tensors = loaded
            self._loaded = None
            for name, tensor in tensors.items():
                self._state[name].data = tensor
        return self._installed

    def _load(self) -> None:
        last = 0
        while True:
            number = self._shelf.current()
            if number != last and self._loaded is None:
                tensors = self._shelf.read(number)
                self._loaded = (
                    number,
                    {n: torch.empty_like(self._state[n]).copy_(t) for n, t in tensors.items() if n in self._state},
                )
                last = number
            time.sleep(_LOOK_S)
