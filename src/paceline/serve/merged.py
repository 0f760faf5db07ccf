"""What a source has given so far, put together: the model as it was made, and over it all that changed since.

Every update is merged, also one that is refused: the next one says only what is new since then. So what is wrong with a
tensor is remembered until another comes in its place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.serve.places import known_names, misfit, places_of, unknown
from paceline.serve.sources.source import Update

_SHOWN = 3  # names of a kind, in words


class Merged:
    """For one model, whose first names count."""

    def __init__(self, model: nn.Module) -> None:
        self._places = places_of(model)
        self._names = known_names(self._places)
        self._made = {name: place.holders[0].detach().clone() for name, place in self._places.items()}
        self.tensors = dict(self._made)
        self._given: set[str] = set()
        self._fresh = set(self.tensors)  # since the last version that was put on the shelf
        self._wrong: dict[str, str] = {}  # by name, why it cannot be used
        self._partly, self._awaits = True, ""

    def take(self, update: Update) -> None:
        if update.whole:
            self._fresh |= self._given
            self.tensors, self._given, self._wrong = dict(self._made), set(), {}
        self._partly, self._awaits = update.partly, update.awaits
        found: dict[str, tuple[str, Tensor]] = {}
        for named, tensor in update.tensors.items():
            name = self._names.get(named)
            if name is None:
                if not update.partly:
                    self._wrong[named] = unknown(named, self._places)
            elif named == name or name not in found:  # of tied tensors the first name counts
                found[name] = named, tensor
        for name, (named, tensor) in found.items():
            self._wrong.pop(name, None)
            if reason := misfit(named, self._places[name], tensor):
                self._wrong[name] = reason
            self.tensors[name] = tensor
            self._given.add(name)
            self._fresh.add(name)

    @property
    def misfit(self) -> str:
        """Why what is merged is no version of the model; "" where it is one."""
        if self._wrong:
            reasons = list(self._wrong.values())
            return "; ".join(reasons[:_SHOWN]) + (f" and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else "")
        missing = self._missing
        if missing and not self._partly:
            return f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        if not self._given:
            return "it has nothing of the model"
        return ""

    @property
    def awaits(self) -> str:
        """What it takes until this is a version: parameters may be as the model was made only if nothing brings them.

        What a script has frozen was trained elsewhere; a factory that makes the model makes random numbers there.
        """
        lacking = [name for name in self._missing if isinstance(self._places[name].holders[0], nn.Parameter)]
        if not lacking or not self._given or not self._awaits:
            return ""
        return f"{self._awaits}: {_listed(lacking)} {'is' if len(lacking) == 1 else 'are'} on no server"

    @property
    def note(self) -> str:
        missing = self._missing
        return f"as the model was made: {_listed(missing)}" if missing and self._given else ""

    @property
    def _missing(self) -> list[str]:
        return [name for name in self._places if name not in self._given]

    def fresh(self) -> dict[str, Tensor]:
        """What changed since the last version that was put on the shelf."""
        return {name: self.tensors[name] for name in self.tensors if name in self._fresh}

    def put(self) -> None:
        """All of it is on the shelf now."""
        self._fresh.clear()

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Set the model to these tensors."""
        with torch.no_grad():
            for name, place in self._places.items():
                if name in tensors:
                    for holder in place.holders:
                        holder.copy_(tensors[name])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
