"""A state on its way from one member to another while both go on.

    there  `Lent`: tensors are copied and sent one after another, from where they live. Before they change, `keep`
           copies those that have not gone yet, so what arrives is the state as of when it was lent
    here   `Coming`: gathers them in a thread; `wait` gives the state when all are here

What is said beforehand (`Lent.head`) is the structure of the state, and the form of each tensor.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from paceline.checkpoint import rebuild, tree
from paceline.checkpoint.part import PIECE_BYTES
from paceline.core.errors import CheckpointError, Interrupted, PacelineError

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pipe(Protocol):
    """One end of a channel."""

    name: str

    def send(self, *parts: bytes | bytearray | memoryview) -> None: ...
    def recv(self, limit_s: float) -> bytes | bytearray | memoryview: ...


class Lent:
    """The side that has the state. Its tensors must not change before `keep` was called."""

    def __init__(self, state: Any, pipes: Sequence[Pipe]) -> None:
        flat = tree.flatten(state)
        forms = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in flat.tensors.items()]
        self.head = {"structure": json.dumps(flat.structure), "tensors": forms}
        self._tensors: list[torch.Tensor | None] = list(flat.tensors.values())
        self._kept = False
        self._lock = threading.Lock()
        self._pipes = list(pipes)
        self._thread = threading.Thread(target=self._send, name="paceline-heal", daemon=True)
        self._thread.start()

    def keep(self) -> None:
        """The tensors are going to change."""
        if self._kept:
            return
        with self._lock:
            self._tensors = [None if t is None else _copied(t) for t in self._tensors]
            self._kept = True

    def _send(self) -> None:
        for number in range(len(self._tensors)):
            with self._lock:
                tensor, self._tensors[number] = self._tensors[number], None
                assert tensor is not None
                copy = tensor if self._kept else _copied(tensor)
            for pipe in list(self._pipes):
                try:
                    _pour(copy, pipe)
                except PacelineError:  # it is gone; who waits for it hears of that
                    self._pipes.remove(pipe)
            if not self._pipes:
                break
        with self._lock:
            self._tensors, self._kept = [], True


class Coming:
    """The side that gets the state."""

    def __init__(self, head: dict[str, Any], pipe: Pipe, limit_s: float) -> None:
        self._head = head
        self._pipe = pipe
        self._limit_s = limit_s
        self._tensors: dict[str, torch.Tensor] = {}
        self._error: PacelineError | None = None
        self._thread = threading.Thread(target=self._gather, name="paceline-heal", daemon=True)
        self._thread.start()

    def wait(self) -> Any:
        """The state, when all of it is here; Interrupted where it cannot come any more."""
        self._thread.join()  # it ends: every wait in it has a limit, and a closed channel ends it at once
        if self._error:
            raise self._error
        return rebuild.unflatten(json.loads(self._head["structure"]), self._tensors)

    def _gather(self) -> None:
        try:
            for name, dtype, shape in self._head["tensors"]:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                flat = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else torch.empty(0).numpy()
                at = 0
                while at < len(flat):
                    piece = self._pipe.recv(self._limit_s)
                    if not len(piece) or at + len(piece) > len(flat):
                        raise Interrupted(f"{self._pipe.name} sent {len(piece)} bytes of {name!r}, which do not fit")
                    flat.data[at : at + len(piece)] = piece
                    at += len(piece)
                self._tensors[name] = tensor
        except PacelineError as error:
            self._error = error
        except (RuntimeError, MemoryError) as error:  # no memory for it
            self._error = CheckpointError(f"the state of another member could not be taken over: {error}")


def digest(state: Any) -> bytes:
    """Equal for equal states, and quick: tensors are summed, not hashed.

    >>> digest({"w": torch.ones(2), "n": 1}) == digest({"w": torch.ones(2), "n": 1})
    True
    >>> digest({"w": torch.ones(2)}) == digest({"w": torch.tensor([1.0, 1.0000001])})
    False
    """
    flat = tree.flatten(state)
    sums = []
    for name, tensor in flat.tensors.items():
        words = tensor.detach().contiguous().view(-1)
        words = torch.view_as_real(words).view(-1) if words.is_complex() else words
        size = words.element_size()
        sums.append((name, int(words.view(_WORDS[size]).sum(dtype=torch.int64)) if words.numel() else 0))
    return hashlib.sha256(json.dumps([flat.structure, sums]).encode()).digest()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _pour(tensor: torch.Tensor, pipe: Pipe) -> None:
    if not tensor.numel():
        return
    whole = tensor.view(-1).view(torch.uint8).numpy().data
    for start in range(0, len(whole), PIECE_BYTES):
        pipe.send(whole[start : start + PIECE_BYTES])
