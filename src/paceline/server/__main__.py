"""A server's process: started by the launcher beside the workers, ends when all of them have left.

python -m paceline.server
"""

from __future__ import annotations

from pathlib import Path

from paceline.core import queue
from paceline.core.status import Status
from paceline.core.view import Member
from paceline.environment import detect
from paceline.membership import meet
from paceline.server.connection import connect
from paceline.server.dealing import Dealing
from paceline.server.outside.desk import Desk
from paceline.server.rounds import agree
from paceline.server.service import Service
from paceline.transport.hub import Hub
from paceline.transport.wires import Wires, own_address

_LOOK_S = 1.0


def main() -> None:
    place = detect()
    wires: list[Wires] = []

    def describe(token: str) -> Member:
        address = "127.0.0.1"
        if place.local_size != place.size:
            address = own_address(place.rendezvous.rsplit(":", 1)[0].strip("[]"))
        wires.append(Wires(token, address))
        return wires[0].describe(place.rank, place.host)

    meeting = meet(place, describe)
    settings = meeting.settings
    directory = Path(settings.root) / settings.name
    status = Status(directory / "status" / f"rank-{place.rank}", place.host)
    status.set("connecting")
    wires[0].join(meeting.view, place.rank, limit_s=settings.wait_limit_s, status=status)
    agreement = agree(wires[0], range(place.workers, place.size))
    service = Service(limit_s=settings.wait_limit_s, agreement=agreement)
    hub = dealing = None
    if place.rank == place.workers:
        hub = Hub(wires[0], range(place.workers))
        dealing = Dealing(wires[0], range(place.workers), pushes=True)
        service.settle, service.left = dealing.settle, dealing.left
    desk = Desk(
        wires[0],
        range(place.workers, place.size),
        directory=directory,
        token=meeting.token,
        strategy=settings.strategy,
        service=lambda: service,
    )
    look = service.look

    def tell_version() -> None:
        """With every push: should this process be killed, the launcher reads here how far it had come."""
        look()
        version = max((table.shard.version for table in service.tables.values()), default=0)
        if version != status.step:
            status.at(version, 0)

    def tell() -> None:
        told = service.readings()
        half = f", {told['halves']:.0f} half applied" if told["halves"] else ""
        if dealing:
            queue.write(directory, dealing.queue())
        status.set(f"serving: {told['applied']:.0f} pushes applied, {told['dropped']:.0f} dropped{half}")

    service.look = tell_version
    try:
        for rank in range(place.workers):
            service.attach(connect(wires[0], rank, place.rank))
        while not service.wait(_LOOK_S):
            service.still(tell)
        if dealing:
            queue.write(directory, ())
        status.set("finished")
    finally:
        desk.close()
        if hub and dealing:
            hub.close()
            dealing.close()
        service.close()
        wires[0].close()


if __name__ == "__main__":
    main()
