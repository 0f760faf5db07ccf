"""Rounds with backups, or whose workers may be lost: who is in a round, decided in one place for all servers.

    each server  → first    where it stands: who is here, and whose push for the round is whole
    first server → all      the round is closed, with these workers

By the same channels the first server learns what the others have of a worker that was lost (`server.lasts`):

    first server → all      this worker is lost
    each server  → first    its account of it, when that worker is gone there too

A round is closed when all workers but the backups are whole on every server (a lost one, or one that rests, counts
against the backups); so whatever fails, it has the same
contributors on all of them. A worker that died when only some servers had its push is not here on one of them at
least: it is not waited for, and not counted.

Standings are whole pictures, not changes: a late one is replaced by the next. A round does not go on without the other
side's answer, so what is unread on a channel between servers stays small.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence

from paceline.core.errors import ConfigError, Interrupted, PacelineError
from paceline.server import messages as m
from paceline.server.lasts import Lasts
from paceline.transport.channel import Channel
from paceline.transport.wires import Wires

_LANE = "rounds"
_KEPT = 1024  # accounts that nobody has asked for


class Rounds:
    """Those of one table, as the first server decides them. Opens nothing and waits for nothing.

    >>> whole = (0, 7), (2, 9)
    >>> standing = m.Standing(table=0, servers=1, round=0, backups=1, here=(0, 1, 2), resting=(), whole=whole)
    >>> Rounds().hear(0, standing)
    Closed(table=0, round=0, contributors=((0, 7), (2, 9)))
    """

    def __init__(self) -> None:
        self._round = 0
        self._standings: dict[int, m.Standing] = {}  # by server
        self._known: set[int] = set()  # workers that have ever been here

    def hear(self, server: int, standing: m.Standing) -> m.Closed | None:
        """A server says where it stands; the round that is closed by that."""
        self._standings[server] = standing
        all_ = list(self._standings.values())
        # One that has not heard yet of the last round's end still speaks of that.
        if len(all_) < standing.servers or any(s.round != self._round for s in all_):
            return None
        backups = None if any(s.backups is None for s in all_) else min(s.backups or 0 for s in all_)
        if backups is None:  # while the gate turns, some have turned already
            return None
        # Where every push counts, a worker is here, or rests, as the first server says: what it has told that one holds
        # for all rounds that are closed from then on.
        told = all_ if backups else [self._standings[min(self._standings)]]
        here = set.intersection(*(set(s.here) for s in told))
        self._known |= here
        resting = {rank for s in told for rank in s.resting}
        whole = set.intersection(*(set(s.whole) for s in all_))
        if len(whole) < max(1, min(len(here - resting), len(self._known) - backups)):
            return None
        self._round += 1
        return m.Closed(standing.table, standing.round, tuple(sorted(whole)))


class Agreement:
    """One server's part in it: tells where it stands, and hears which rounds are closed.

    Args:
        server: its number.
        channels: on the first server those to the others, in the order of their numbers; on the others, the one to it.
    """

    def __init__(self, server: int = 0, channels: Sequence[Channel] = ()) -> None:
        self._server = server
        self._channels = list(channels)
        self._closed = False
        self._rounds: dict[int, Rounds] = {}  # by table, on the first server
        self._stood: dict[int, m.Standing] = {}  # by table: what was said last
        self._lasts = Lasts(len(self._channels) + 1)
        self._accounts: dict[tuple[int, int], m.Account] = {}  # by rank and life, on the others: of who is gone
        self._wanted: set[tuple[int, int]] = set()  # and of who is not, but has been asked for

    def start(
        self,
        lock: threading.RLock,
        close: Callable[[m.Closed], None],
        fail: Callable[[str], None],
        here: Callable[[int, int], bool],
        lost: Callable[[Mapping[int, m.Account]], None],
    ) -> None:
        """Begin to listen. All that is given is called with the lock held, and with it the others are to be called.

        `here` says whether a worker's connection, by rank and life, is not over. `lost` gets all servers' accounts of a
        lost one, on the first server.
        """
        self._lock, self._close, self._fail, self._here, self._lost = lock, close, fail, here, lost
        for i, channel in enumerate(self._channels):
            other = 0 if self._server else i + 1
            thread = threading.Thread(
                target=self._listen, args=(other, channel), name=f"paceline-rounds-{other}", daemon=True
            )
            thread.start()

    def stand(self, standing: m.Standing) -> None:
        """A shard of this server stands here."""
        if self._stood.get(standing.table) == standing:
            return
        if standing.servers > 1 and not self._channels:
            raise ConfigError(f"a round of {standing.servers} servers, and this one does not know the others")
        self._stood[standing.table] = standing
        if self._server:
            self._say(self._channels[0], standing)
        else:
            self._hear(0, standing)

    def gone(self, account: m.Account, *, said: bool) -> None:
        """A worker's connection is over: what it has pushed here is to be held against what it has pushed elsewhere.

        `said`: it has said goodbye; but perhaps not to the first server, which is the one that asks.
        """
        key = account.rank, account.life
        if not self._server:
            if not said:
                for channel in self._channels:
                    self._say(channel, m.Lost(*key))
                self._tell(0, account)
        elif key in self._wanted:
            self._wanted.discard(key)
            self._say(self._channels[0], account)
        else:
            self._accounts[key] = account
            for old in list(self._accounts)[:-_KEPT]:
                del self._accounts[old]

    def close(self) -> None:
        self._closed = True
        for channel in self._channels:
            channel.close()

    def _hear(self, server: int, standing: m.Standing) -> None:
        if closed := self._rounds.setdefault(standing.table, Rounds()).hear(server, standing):
            for channel in self._channels:
                self._say(channel, closed)
            self._close(closed)

    def _answer(self, key: tuple[int, int]) -> None:
        if self._here(*key):
            self._wanted.add(key)  # what it has pushed is read to its end first
        else:
            self._say(self._channels[0], self._accounts.pop(key, m.Account(*key)))

    def _tell(self, server: int, account: m.Account) -> None:
        if accounts := self._lasts.hear(server, account):
            self._lost(accounts)

    def _say(self, channel: Channel, message: m.BetweenServers) -> None:
        with contextlib.suppress(PacelineError):  # its own thread will notice
            channel.send(m.encode(message))

    def _listen(self, other: int, channel: Channel) -> None:
        try:
            while True:
                message = m.decode_between_servers(channel.listen())
                with self._lock:
                    if isinstance(message, m.Standing):
                        self._hear(other, message)
                    elif isinstance(message, m.Account):
                        self._tell(other, message)
                    elif isinstance(message, m.Lost):
                        self._answer((message.rank, message.life))
                    else:
                        self._close(message)
        except Interrupted:
            with self._lock:
                if self._stood and not self._closed:
                    self._fail(f"server {other} cannot be reached, and rounds are closed by all servers together")
        except Exception as error:  # a fault of ours: shards that are not alike must not go on
            traceback.print_exc()
            with self._lock:
                self._fail(f"servers could not close a round together: {error!r}; the server's log has more")


def agree(wires: Wires, servers: Sequence[int]) -> Agreement:
    """This member's part among these servers, by their ranks; all of them call this."""
    server = list(servers).index(wires.rank)
    others = servers[:1] if server else servers[1:]
    return Agreement(server, [wires.mesh.channel(rank, _LANE) for rank in others])
