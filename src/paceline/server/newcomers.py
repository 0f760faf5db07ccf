"""Those who replace lost workers, as a server lets them in: each of their lanes, once that of the one before is over.

A worker is over when its connections are: then its pushes are applied or forgotten, and its batches dealt again. The
order in which a newcomer opens its lanes does not matter.
"""

from __future__ import annotations

import contextlib
import threading

from paceline.core.errors import PacelineError
from paceline.server import dealing as deal
from paceline.server.connection import Connection, LinkMemory, lane_of
from paceline.server.dealing import Dealing
from paceline.server.service import Service
from paceline.transport import hub as hubs
from paceline.transport.channel import Channel
from paceline.transport.hub import Hub
from paceline.transport.wires import Wires


class Newcomers:
    """Lets them in, each connection in a thread of its own. `hub` and `dealing` are the first server's."""

    def __init__(self, wires: Wires, service: Service, hub: Hub | None, dealing: Dealing | None) -> None:
        self._wires = wires
        self._service = service
        self._hub = hub
        self._dealing = dealing
        wires.mesh.newcomer = self._take

    def _take(self, rank: int, lane: str, life: int, channel: Channel) -> None:
        work = (rank, lane, life, channel)
        threading.Thread(target=self._admit, args=work, name="paceline-newcomer", daemon=True).start()

    def _admit(self, rank: int, lane: str, life: int, channel: Channel) -> None:
        limit_s = self._service.limit_s
        with contextlib.suppress(PacelineError):  # it is gone already, or the one before it is not: it will notice
            if self._hub and lane == hubs.LANE:
                self._hub.admit(rank, channel, limit_s)
                return
            if self._dealing and lane == deal.LANE:
                self._dealing.came(rank, life, limit_s)
                self._dealing.admit(rank, channel)
                return
            if lane == lane_of(self._wires.rank):
                self._serve(rank, life, channel)
                return
        channel.close()

    def _serve(self, rank: int, life: int, channel: Channel) -> None:
        limit_s, here = self._service.limit_s, self._wires.rank
        members, memory = self._wires.view.members, None
        if members[rank].host == members[here].host:  # a member is started again where it was
            self._wires.links.admit(rank, life, limit_s)
            memory = LinkMemory(self._wires.links, rank, here)
        if self._dealing:
            self._dealing.came(rank, life, limit_s)
        try:
            self._service.admit(Connection(rank, channel, memory, life))
        except PacelineError:
            if self._dealing:
                self._dealing.left(rank)
            raise
