"""Where the members' parts of a tensor lie in the whole: along one dimension, in blocks, each shared out by sizes.

Lay(0, ((3, 3),))                  six rows: the first member has three, the second the others
Lay(0, ((2, 2), (2, 2), (2, 2)))   queries, keys and values in one tensor: each member has its heads of each
Lay(0, ((0, 6),))                  the second member has all of it
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Lay(NamedTuple):
    """A dimension of a tensor, cut."""

    dim: int
    blocks: tuple[tuple[int, ...], ...]  # for each block: how much of it each member has

    @property
    def whole(self) -> int:
        """The size of the dimension."""
        return sum(map(sum, self.blocks))

    def own(self, rank: int) -> int:
        """How much of it a member has.

        >>> Lay(0, ((2, 1), (2, 1))).own(0)
        4
        """
        return sum(block[rank] for block in self.blocks)

    def at(self, dim: int) -> Lay:
        return self._replace(dim=dim)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A member's part.

        >>> Lay(0, ((2, 1), (2, 1))).part(torch.arange(6), 1)
        tensor([2, 5])
        """
        pieces = []
        start = 0
        for block in self.blocks:
            pieces.append(whole.narrow(self.dim, start + sum(block[:rank]), block[rank]))
            start += sum(block)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The whole, of everyone's parts.

        >>> Lay(0, ((2, 1), (2, 1))).join([torch.tensor([0, 1, 3, 4]), torch.tensor([2, 5])])
        tensor([0, 1, 2, 3, 4, 5])
        """
        rows = [torch.split(part, [block[rank] for block in self.blocks], self.dim) for rank, part in enumerate(parts)]
        return torch.cat([row[number] for number in range(len(self.blocks)) for row in rows], self.dim)


def even(size: int, members: int) -> tuple[int, ...]:
    """As torch.chunk does it.

    >>> even(7, 2), even(5, 4)
    ((4, 3), (2, 2, 1, 0))
    """
    most = -(-size // members)
    return tuple(max(0, min(most, size - most * rank)) for rank in range(members))
