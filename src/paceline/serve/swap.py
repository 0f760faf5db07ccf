"""Puts the shelf's current version into a model between two batches, in a replica.

A thread reads the version that is to be served into tensors of its own, and checks it. `install` is called by who
computes, when no batch is under way: where something is ready, it makes the model's parameters and buffers point there,
which copies nothing, and where nothing is, it looks at one empty queue. Every row of a batch is so made by one version.

What cannot be used is refused: the old version stays, and `refused` says why. `torch.compile` sees the new tensors,
since it takes parameters as inputs. A form that has their addresses built in (CUDA graphs that were captured by hand)
needs `into=True`: then they are copied, between batches, to where the old ones lie. What has their values folded in
(frozen graphs) cannot follow.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.serve.places import Unfit, misfit, places_of, unknown
from paceline.serve.shelf import Place as Lies
from paceline.serve.shelf import Shelf

_LOOK_S = 0.02


class _Loaded(NamedTuple):
    number: int
    pairs: list[tuple[Tensor, Tensor]]  # of the model, and what it is to be
    before: list[Tensor]  # what it was: let go by the loading thread, since that takes time too


class Swap:
    """One model's.

    Args:
        into: copy into the model's tensors instead of replacing them.
        cast: the model computes in another floating type than it was trained in.
    """

    def __init__(self, model: nn.Module, shelf: Shelf, *, into: bool = False, cast: bool = False) -> None:
        self.number = 0  # of the version that is in the model; 0: as it was made
        self.refused = ""  # why the version that is to be served is not
        self._into, self._cast = into, cast
        self._shelf = shelf
        self._places = places_of(model)
        self._ready: deque[_Loaded] = deque(maxlen=1)
        self._spent: deque[_Loaded] = deque(maxlen=4)
        self._lies: dict[str, Lies] = {}  # what was loaded last
        self._unsure: dict[str, Tensor] = {}  # loaded, and perhaps not in the model yet
        self._tried = self._loaded = 0  # numbers: of the version that was tried last, and of the last that was good
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="paceline-swap", daemon=True)
        self._thread.start()

    def install(self) -> int:
        """Put in what is ready; the number of the version that is in the model now. Call it between two batches."""
        if not self._ready:
            return self.number
        try:
            loaded = self._ready.pop()
        except IndexError:  # the other thread is about to put a newer one there
            return self.number
        if self._into:
            with torch.inference_mode():
                for tensor, new in loaded.pairs:
                    tensor.copy_(new)
        else:
            for tensor, new in loaded.pairs:
                tensor.data = new
        self.number = loaded.number
        self._spent.append(loaded)
        return self.number

    def close(self) -> None:
        self._closed.set()
        self._thread.join(10.0)

    # ---- in a thread of its own

    def _follow(self) -> None:
        while True:
            self._spent.clear()
            number = self._tried
            try:
                number = self._shelf.current()
                if number not in (0, self._tried):
                    self._load(number)
                    self._tried, self.refused = number, ""
            except (PacelineError, OSError) as error:
                if self._is_still(number):  # else it was removed meanwhile, since another one is served
                    self._tried, self.refused = number, str(error)
            except Exception as error:  # a fault of ours: the old version stays, and says so
                self._tried, self.refused = number, f"version {number}: {type(error).__name__}: {error}"
            if self._closed.wait(_LOOK_S):
                return

    def _is_still(self, number: int) -> bool:
        try:
            return self._shelf.current() == number
        except (PacelineError, OSError):
            return True

    def _load(self, number: int) -> None:
        lies = self._by_place(self._shelf.where(number), number)
        if self._loaded == self.number:
            self._unsure.clear()  # all that was loaded is in the model
        new = {name: named for name, named in lies.items() if self._lies.get(name) != named[1]}
        tensors = self._shelf.read(number, [named for named, _ in new.values()])
        for name, (named, _) in new.items():
            if reason := misfit(named, self._places[name], tensors[named], cast=self._cast):
                raise Unfit(f"version {number}: {reason}")
        for name, (named, _) in new.items():
            self._unsure[name] = _alike(tensors[named], self._places[name].holders[0])
        holders = [(holder, tensor) for name, tensor in self._unsure.items() for holder in self._places[name].holders]
        before = [] if self._into else [holder.data for holder, _ in holders]
        self._lies, self._loaded = {name: where for name, (_, where) in lies.items()}, number
        self._ready.append(_Loaded(number, holders, before))

    def _by_place(self, where: dict[str, Lies], number: int) -> dict[str, tuple[str, Lies]]:
        """By the first names of places: the name in the version, and where it lies."""
        found: dict[str, tuple[str, Lies]] = {}
        for place in self._places.values():
            named = next((name for name in (place.name, *place.aliases) if name in where), None)
            if named is None:
                raise Unfit(f"version {number}: {place.name!r} is missing")
            found[place.name] = named, where[named]
        known = {name for place in self._places.values() for name in (place.name, *place.aliases)}
        for name in where:
            if name not in known:
                raise Unfit(f"version {number}: {unknown(name, self._places)}")
        return found


def _alike(tensor: Tensor, like: Tensor) -> Tensor:
    """In the type, on the device and with the strides of the model's own."""
    if tensor.dtype == like.dtype and tensor.device == like.device and tensor.stride() == like.stride():
        return tensor
    made = torch.empty_like(like, requires_grad=False)
    made.copy_(tensor)
    if made.device.type == "cuda":
        torch.cuda.synchronize(made.device)
    return made
