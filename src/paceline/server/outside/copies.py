"""Copies of a server's weights, for those who look on.

A copy is made under the lock of the shards, by one copy of memory, and read without it: a slow reader holds up nobody.
In sync it is made between two rounds, so it is of one version; where nobody waits for anybody a push is nearly always
half applied, and the copy says so. However often readers ask, copying takes a small share of the time, and few copies
are kept at once.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch

from paceline.core.errors import TimedOut
from paceline.server.outside.changes import digests_of
from paceline.server.outside.visits import Part, Standing
from paceline.server.service import Service

_AT_ONCE = 2  # copies that readers may hold
_PAUSE = 10.0  # times as long as a copy took, before the next
_LOOK_S = 0.005
_NEWS_S = 0.05  # between two looks at shards that nobody has told about


class Copy:
    """A server's weights at one moment."""

    def __init__(
        self, version: int, mixed: bool, parts: tuple[Part, ...], data: list[torch.Tensor], made_at: float
    ) -> None:
        self.version = version
        self.mixed = mixed
        self.parts = parts
        self.data = data  # by part, flat bytes
        self.made_at = made_at
        self._digests: list[bytes] | None = None
        self._counting = threading.Lock()

    def digests(self) -> list[bytes]:
        """Of the blocks of each part, taken once, however many follow."""
        with self._counting:
            if self._digests is None:
                self._digests = [digests_of(data) for data in self.data]
            return self._digests


class _Wish:
    def __init__(self, at: int) -> None:
        self.at = at
        self.over = threading.Event()
        self.copy: Copy | None = None


class Copies:
    """Makes copies for one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._wishes: list[_Wish] = []  # added to at any time, taken from with the lock of the shards held
        self._alive: weakref.WeakSet[Copy] = weakref.WeakSet()
        self._next = 0.0  # when there may be another copy
        self._news = threading.Condition()
        self._seen = self.standing().version, time.time()  # and since when
        before = service.look

        def look() -> None:
            before()
            self._look()

        service.look = look

    def standing(self) -> Standing:
        """How far the shards are; the version is the sum over all tables."""
        shards = [table.shard for table in list(self._service.tables.values()) if table.chunks]
        version, sync = sum(shard.version for shard in shards), all(shard.sync for shard in shards)
        return Standing(version=version, sync=sync, serves=bool(shards))

    def await_newer(self, than: int, limit_s: float, over: Callable[[], bool]) -> None:
        """Until the shards are further than this version, for so long, or until it is `over`."""
        deadline = time.monotonic() + limit_s
        with self._news:
            while (left := deadline - time.monotonic()) > 0 and not over():
                standing = self.standing()
                if standing.version > than or not standing.serves:
                    return
                self._news.wait(min(left, _NEWS_S))

    def pin(self, at: int, limit_s: float) -> Copy | None:
        """A copy, of version `at` unless that is -1; None where that version is over or does not come in time.

        TimedOut: there are no weights yet, or others hold all copies.
        """
        wish = _Wish(at)
        deadline = time.monotonic() + limit_s
        self._wishes.append(wish)
        while not wish.over.wait(_LOOK_S):  # whoever trains looks by itself
            self._service.still(self._look)
            if time.monotonic() > deadline:
                self._service.still(lambda: self._wishes.remove(wish) if wish in self._wishes else None)
                break
        if wish.copy is None and at < 0:
            why = "others are reading" if len(self._alive) >= _AT_ONCE else "the run has not put its weights there yet"
            raise TimedOut(f"no copy of the weights within {limit_s:g} s: {why}; try again")
        return wish.copy

    # ---- with the lock of the shards held

    def _look(self) -> None:
        """Called whenever the shards may have changed."""
        version = self.standing().version
        if version != self._seen[0]:
            with self._news:
                self._seen = version, time.time()
                self._news.notify_all()
        if not self._wishes:
            return
        tables = list(self._service.tables.values())
        if not tables or not all(table.shard.stock.filled for table in tables):
            return
        standing = self.standing()
        version, sync = standing.version, standing.sync
        between = all(table.shard.between for table in tables)
        wishes = list(self._wishes)
        over = {w for w in wishes if w.at >= 0 and (w.at < version or (w.at == version and not between))}
        here = [w for w in wishes if w.at in (-1, version) and w not in over]
        copy = self._copy(version, not between) if here and (between or not sync) else None
        if copy:
            for wish in here:
                wish.copy = copy
            over.update(here)
        for wish in over:
            self._wishes.remove(wish)
            wish.over.set()

    def _copy(self, version: int, mixed: bool) -> Copy | None:
        for copy in self._alive:
            if copy.version == version and not copy.mixed and not mixed:
                return copy
        if len(self._alive) >= _AT_ONCE or time.monotonic() < self._next:
            return None
        began = time.monotonic()
        parts, data = [], []
        for number, table in self._service.tables.items():
            terms = table.terms
            parts.append(
                Part(
                    table=number,
                    tensors=terms.tensors,
                    servers=terms.servers,
                    server=terms.server,
                    cut=terms.cut,
                    view=self._service.view,
                    nbytes=table.nbytes,
                )
            )
            data.append(table.block.data[: table.nbytes].clone())
        copy = Copy(version, mixed, tuple(parts), data, self._seen[1])
        self._alive.add(copy)
        now = time.monotonic()
        self._next = now + _PAUSE * (now - began)
        return copy
