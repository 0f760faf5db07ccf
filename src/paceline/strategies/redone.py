"""A batch that a lost worker had begun, among others in one push: what it adds is taken back where servers have it.

Where a push is made of one such batch alone, chunks that have it get nothing. Where it is one of several
(`run.accumulate()`, workers that train apart), their gradients are one sum by then. So what was there before the turn
of that batch is kept, and put back behind it, for those parts of the parameters alone that have the batch already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Span = tuple[int, int, int]  # of which tensor, from where, up to where


class Redone:
    """The turn of one batch, for one table.

    Args:
        sums: what the next push is made of.
        anew: it begins at nothing; else at weights that come from the servers.

    >>> sums = [torch.tensor([1.0, 1.0, 1.0])]
    >>> redone = Redone(lambda: sums)
    >>> redone.begin([(0, 1, 3)], kept=True)
    >>> sums[0] += 5
    >>> redone.end()
    >>> sums
    [tensor([6., 1., 1.])]
    """

    def __init__(self, sums: Callable[[], Sequence[torch.Tensor | None]], *, anew: bool = True) -> None:
        self._sums = sums
        self._anew = anew
        self._spans: list[Span] = []
        self._before: dict[int, torch.Tensor] = {}

    def begin(self, spans: Sequence[Span], *, kept: bool) -> None:
        """A turn begins. `spans` have its batch already; `kept`: what is there now will be pushed too."""
        self._spans, self._before = list(spans), {}
        if spans and (kept or not self._anew):
            sums = self._sums()
            touched = {number: sums[number] for number, _, _ in spans}
            self._before = {number: now.detach().clone() for number, now in touched.items() if now is not None}

    def cleared(self) -> None:
        """What was there has been thrown away."""
        if self._anew:
            self._before = {}

    @torch.no_grad()
    def end(self) -> None:
        """The turn is over."""
        sums = self._sums() if self._spans else ()
        for number, start, stop in self._spans:
            if (now := sums[number]) is None:
                continue
            flat, before = now.reshape(-1), self._before.get(number)  # a view, unless its strides are odd
            flat[start:stop] = 0.0 if before is None else before.reshape(-1)[start:stop]
            now.copy_(flat.view(now.shape))
        self._spans, self._before = [], {}


def gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of these; sparse ones are made dense."""
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()
    return [p.grad for p in parameters]
