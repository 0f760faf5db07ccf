"""The weights of rounds as guests fetch them: encoded once, however many come.

Only the training thread knows when the weights stand still, so it encodes them, between two steps (`look`), and only
where a guest has asked since the last round. A slow guest reads on from what it was given; in each code at most two
rounds are kept, and while both are being read others get the newer one of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from paceline.codecs import Codec, Context
from paceline.server.outside.calls import make_weights_code

_AT_ONCE = 2  # rounds, in each code


class Wrapped:
    """The weights of one round in one code."""

    def __init__(self, round: int, sizes: list[int], data: torch.Tensor) -> None:
        self.round, self.sizes, self.data = round, sizes, data


class Shelf:
    """`weights` gives the parameters as of the last round; called in the training thread."""

    def __init__(self, weights: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._weights = weights
        self._changed = threading.Condition()
        self._newest: dict[str, Wrapped] = {}  # by code
        self._alive: dict[str, weakref.WeakSet[Wrapped]] = {}  # of each code, also those that are only read on
        self._wanted: set[str] = set()
        self.round = -1  # of the weights that there are; -1: none yet

    def look(self, round: int) -> None:
        """In the training thread: the weights are of this round; they are encoded if somebody waits for them."""
        if round == self.round and not self._wanted:
            return
        with self._changed:
            self.round = round
            for words in self._wanted:
                if words not in self._newest or self._newest[words].round != round:
                    self._newest.pop(words, None)  # unless a guest reads it, it is gone before more memory is taken
                    self._newest[words] = self._wrapped(words)
            self._wanted.clear()
            self._changed.notify_all()

    def fetch(self, words: str, newer_than: int, wait_s: float, limit_s: float) -> Wrapped | None:
        """Weights that are newer; waits for such a round, and then until the training thread has encoded them."""
        with self._changed:
            if 0 <= self.round <= newer_than:
                self._changed.wait_for(lambda: self.round > newer_than, wait_s)
            if 0 <= self.round <= newer_than:
                return None
            held = self._newest.get(words)
            if held is None or held.round != self.round:
                self._wanted.add(words)
                self._changed.wait_for(lambda: words not in self._wanted, limit_s)
                held = self._newest.get(words)
            return held if held and held.round > newer_than else None

    def _wrapped(self, words: str) -> Wrapped:
        alive = self._alive.setdefault(words, weakref.WeakSet())
        if len(held := list(alive)) >= _AT_ONCE:  # held: a guest that ends now would let it go
            return max(held, key=lambda wrapped: wrapped.round)
        made = wrap(self.round, self._weights(), make_weights_code(words))
        alive.add(made)
        return made


@torch.no_grad()
def wrap(round: int, tensors: Sequence[torch.Tensor], code: Codec) -> Wrapped:
    """Tensors one after another as bytes."""
    data = torch.empty(sum(code.nbytes(t.numel()) for t in tensors), dtype=torch.uint8)
    sizes: list[int] = []
    for i, tensor in enumerate(tensors):
        flat = tensor.detach().to("cpu", torch.float32).reshape(-1).contiguous()
        sizes.append(code.encode_into(flat, None, data[sum(sizes) :], Context(seed=i)))
    return Wrapped(round, sizes, data[: sum(sizes)])
