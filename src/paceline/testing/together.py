"""Members as threads of one process: the quickest way to run real collectives in a test.

The wires are real: unix sockets and shared memory within a "host", TCP channels between "hosts" with made-up names.
Autograd, optimizers and loaders work per thread as well; what needs a process of its own wants `Cluster`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from paceline.core.status import Status
from paceline.core.view import View
from paceline.transport.group import Group
from paceline.transport.wires import Wires

T = TypeVar("T")


def together(
    size: int,
    body: Callable[[Group], T],
    *,
    hosts: Sequence[str] | None = None,
    labels: Mapping[int, tuple[str, ...]] | None = None,
    limit_s: float = 20.0,
) -> list[T]:
    """What `body` returns on each member, by rank; the first failure is raised. `labels` are by rank too.

    >>> import torch
    >>> together(2, lambda group: group.all_reduce(torch.tensor([float(group.rank + 1)])).item())
    [3.0, 3.0]
    """
    hosts = hosts or ["here"] * size
    wires = [Wires("a token that only this test knows") for _ in range(size)]
    own = labels or {}
    view = View(number=1, members=tuple(w.describe(r, hosts[r], own.get(r, ())) for r, w in enumerate(wires)))
    results: dict[int, T] = {}
    groups: dict[int, Group] = {}
    failures: list[tuple[int, BaseException]] = []

    def member(rank: int) -> None:
        try:
            wires[rank].join(view, rank, limit_s=limit_s, status=Status(None))
            group = Group(wires[rank], range(size))
            groups[rank] = group
            results[rank] = body(group)
        except BaseException as error:
            failures.append((rank, error))
            wires[rank].close()  # as the end of a process would: the others are told

    threads = [threading.Thread(target=member, args=(r,), name=f"member-{r}", daemon=True) for r in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit_s * 4)
    finally:
        for group in groups.values():
            group.close()
        for w in wires:
            w.close()
    if failures:
        raise failures[0][1]
    if stuck := [t.name for t in threads if t.is_alive()]:
        raise TimeoutError(f"{', '.join(stuck)} did not come to an end")
    return [results[rank] for rank in range(size)]
