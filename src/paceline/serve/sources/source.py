"""What a source of versions is. The keeper asks it in one thread; it remembers what it has given.

A source says nothing of what becomes of a version: it gives what is new, raises Interrupted or another PacelineError
where it cannot be reached (the keeper asks again, later), and Unfit where there is something new that cannot be used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Update(NamedTuple):
    """What is new."""

    version: int  # as the source counts
    made_at: float  # time.time() when it was made
    tensors: dict[str, Tensor]  # those that changed since the last update
    whole: bool  # these are all: nothing of before counts
    partly: bool = False  # it may lack some of the model's tensors, and have others' beside
    awaits: str = ""  # what will bring the parameters that it lacks; "": nothing will, they are as the model was made


def beside(path: Path) -> Path:
    """Of a file or directory that others write."""
    whole = Path(os.path.abspath(path))
    return whole.with_name(f"{whole.name}.serving")


class Source(Protocol):
    """Where versions come from."""

    @property
    def what(self) -> str:
        """In words, such as "run digits"."""

    @property
    def orders(self) -> Path | None:
        """The folder in which what is ordered of it is kept; None: it has no place here."""

    @property
    def ended(self) -> str:
        """Why nothing more will come, such as "finished"; "": it may. It is asked again all the same."""

    @property
    def note(self) -> str:
        """What else there is to say, such as where buffers come from."""

    def newest(self, wait_s: float) -> Update | None:
        """What is new since the last time; None where nothing is within about so many seconds."""

    def close(self) -> None: ...


def changed(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are not, bit for bit, what they were."""
    return {name: tensor for name, tensor in now.items() if name not in before or not _same(before[name], tensor)}


def _same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*raw)
