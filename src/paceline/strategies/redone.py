"""A batch that a lost worker had begun, among others in one push: what it adds is taken back where servers have it.

Where a push is made of one such batch alone, chunks that have it get nothing. Where it is one of several
(`run.accumulate()`, workers that train apart), their gradients are one sum by then. So what was there before the turn
of that batch is kept, and put back behind it, for those parts of the parameters alone that have the batch already.

Batches of two loaders that go into one loss cannot be told apart: where one of them counts already, the other is left
out with it, so that none counts twice.
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
        self._began: dict[int, torch.Tensor] = {}  # as `before`, also of what is thrown away before it is added to

    def begin(self, spans: Sequence[Span], *, kept: bool) -> None:
        """A turn begins. `spans` have its batch already; `kept`: what is there now will be pushed too."""
        sums = self._sums() if spans else ()
        touched = {number: sums[number] for number, _, _ in spans}
        self._spans = list(spans)
        self._began = {number: now.detach().clone() for number, now in touched.items() if now is not None}
        self._before = dict(self._began) if kept or not self._anew else {}

    @property
    def idle(self) -> bool:
        """Whether a turn is under way that has added nothing yet."""
        sums = self._sums() if self._spans else ()
        pairs = [(sums[number], self._began.get(number)) for number in {number for number, _, _ in self._spans}]
        return bool(pairs) and all(now is None or (old is not None and torch.equal(now, old)) for now, old in pairs)

    def join(self, spans: Sequence[Span]) -> None:
        """Another batch is in the same turn."""
        self._spans += spans

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
        self._spans, self._before, self._began = [], {}, {}


def gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of these; sparse ones are made dense."""
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()
    return [p.grad for p in parameters]
