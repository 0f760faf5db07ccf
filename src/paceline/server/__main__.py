"""A server's process: started by the launcher beside the workers, ends when all of them have left.

python -m paceline.server
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.core import queue, trained
from paceline.core.errors import TimedOut
from paceline.core.status import SERVING, Status
from paceline.core.view import Member
from paceline.environment import detect
from paceline.membership import meet
from paceline.server.connection import connect
from paceline.server.dealing import Dealing
from paceline.server.newcomers import Newcomers
from paceline.server.outside.desk import Desk
from paceline.server.rounds import agree
from paceline.server.service import Service
from paceline.transport.hub import Hub
from paceline.transport.wires import Wires, own_address

_LOOK_S = 1.0
_BEGIN_S = 0.1


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
    service = Service(limit_s=settings.wait_limit_s, agreement=agreement, replaces=meeting.replaces)
    hub = dealing = None
    begun = threading.Event()  # where lost workers are replaced: from then on
    if not meeting.replaces or place.rank > place.workers:
        begun.set()
    if place.rank == place.workers:
        hub = Hub(wires[0], range(place.workers), begun.set)
        dealing = Dealing(wires[0], range(place.workers), pushes=True)
        service.lost = keep = _keeps(directory)
        dealing.again = lambda rank, samples: keep(rank, trained.Work(samples=-samples))
    if meeting.replaces:
        Newcomers(wires[0], service, hub, dealing)
    desk = Desk(
        wires[0],
        range(place.workers, place.size),
        directory=directory,
        token=meeting.token,
        strategy=settings.strategy,
        service=lambda: service,
    )
    if dealing:
        _settle(service, dealing, desk)
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
        status.set(f"{SERVING}: {told['applied']:.0f} pushes applied, {told['dropped']:.0f} dropped{half}")

    service.look = tell_version
    limit_s = settings.join_limit_s
    try:
        for rank in range(place.workers):
            service.attach(connect(wires[0], rank, place.rank))
        heard = time.monotonic()
        while not service.wait(_LOOK_S if begun.is_set() else _BEGIN_S):
            if begun.is_set():
                service.still(tell)
            else:
                status.set("waiting for the first epoch to begin")
            heard = time.monotonic() if not service.alone else heard
            if time.monotonic() - heard > limit_s:
                raise TimedOut(f"all workers were lost, and none has come within {limit_s:g} s")
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


def _settle(service: Service, dealing: Dealing, desk: Desk) -> None:
    """What pushes were made of is used up, where it was dealt and where it was uploaded."""

    def settle(rank: int, leases: Mapping[str, Sequence[int]]) -> None:
        dealing.settle(rank, leases)
        desk.settle(rank, leases)

    def left(rank: int) -> None:
        dealing.left(rank)
        desk.left(rank)

    service.settle, service.torn, service.left = settle, dealing.torn, left


def _keeps(directory: Path) -> Callable[[int, trained.Work], None]:
    """Writes down what lost workers had done."""
    began, known, lock = time.time(), dict[int, trained.Work](), threading.Lock()
    trained.write(directory, began, known)

    def keep(rank: int, work: trained.Work) -> None:
        with lock:
            known[rank] = known.get(rank, trained.Work()) + work
            trained.write(directory, began, known)

    return keep


if __name__ == "__main__":
    main()
