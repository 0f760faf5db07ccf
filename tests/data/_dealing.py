"""Members to whom one more deals out batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from paceline.server.dealing import Dealer, Dealing
from paceline.testing.together import together
from paceline.transport.group import Group


def dealt(
    size: int,
    body: Callable[[Dealer, int], list[int]],
    *,
    hosts: Sequence[str] | None = None,
    labels: Sequence[tuple[str, ...]] = (),
) -> list[list[int]]:
    """What the members return; one more deals until they are done."""
    over = threading.Barrier(size + 1)

    def member(group: Group) -> list[int]:
        wires = group._wires
        assert wires is not None
        if wires.rank == size:
            dealing = Dealing(wires, range(size))
            over.wait(30)
            dealing.close()
            return []
        dealer = Dealer(wires, size)
        try:
            return body(dealer, wires.rank)
        finally:
            over.wait(30)
            dealer.close()

    return together(size + 1, member, hosts=hosts, labels=dict(enumerate(labels)))[:size]
