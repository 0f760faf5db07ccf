"""`paceline status` shows how far an epoch has come: batches done, lent and left, or steps."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from paceline.cli import queue as shown
from paceline.cli import runs
from paceline.cli.status import describe
from paceline.core import queue
from paceline.core.queue import Course, Loan, Part
from paceline.core.status import Status
from paceline.environment import this_host
from paceline.server.dealing import Dealer, Dealing, DealsFor
from paceline.testing.together import together
from paceline.transport.group import Group


def said(directory: Path) -> list[str]:
    known = runs.look(directory)
    assert known
    return shown.lines(known)


def test_what_is_lent_and_by_whom(tmp_path: Path) -> None:
    Status(tmp_path / "status" / "rank-0", this_host(), ["gpu"])
    lent = (Loan(rank=0, batches=2, since=time.time() - 3.0), Loan(rank=2, batches=1, since=time.time()))
    free = Part(label="", done=7, left=4, lent=lent, returned=2)
    queue.write(tmp_path, (Course(loader=1, epoch=2, parts=(free,)),))
    (line,) = said(tmp_path)
    assert line == (
        "loader 1, epoch 3: 7 of 14 batches done, 4 left, 3 lent (member 0: 2, the oldest for 3.0 s; "
        "member 2: 1, the oldest for 0.0 s), 2 came back from members that were lost"
    )
    assert line in describe(tmp_path)
    head, row = describe(tmp_path)[1:3]
    assert head.split()[-2:] == ["labels", "doing"]
    assert row.split()[:6] == ["0", "alive", str(os.getpid()), "1", "0", "gpu"]

    bound = Part(label="site-a", done=1, left=0)
    queue.write(tmp_path, (Course(loader=0, epoch=0, parts=(Part(label="", done=0, left=2), bound)),))
    assert said(tmp_path) == [
        "loader 0, epoch 1: 1 of 3 batches done",
        "  for anybody: 0 of 2 batches done, 2 left",
        "  bound to site-a: 1 of 1 batches done, 0 left",
    ]
    queue.write(tmp_path, ())
    assert said(tmp_path) == []


def test_without_a_queue_steps_are_told(tmp_path: Path) -> None:
    status = Status(tmp_path / "status" / "rank-0", this_host())
    status.at(0, 0)
    assert said(tmp_path) == []  # before the first epoch
    status.enter(1, 40, 60)
    status.at(57, 1)
    assert said(tmp_path) == ["epoch 2: 17 of 60 steps done"]
    (tmp_path / queue.FILE).write_bytes(b"no queue")
    assert said(tmp_path) == ["epoch 2: 17 of 60 steps done"]


def test_the_server_that_deals_knows_what_is_under_way() -> None:
    over = threading.Barrier(3)
    seen: list[tuple[Course, ...]] = []

    def member(group: Group) -> None:
        wires = group._wires
        assert wires is not None
        if wires.rank == 2:
            dealing = Dealing(wires, range(2))
            for _ in range(3):
                over.wait(10)
                seen.append(dealing.queue())
                over.wait(10)
            dealing.close()
            return
        deal = DealsFor(Dealer(wires, 2), "1")
        take = [deal.take("77/4", 3, wait=True, waits=lambda: None) for _ in range(2 - wires.rank)]
        over.wait(10)
        over.wait(10)
        if wires.rank == 0:
            deal.done("77/4", [n for n in take if n is not None])
            assert deal.take("77/5", 1, wait=False, waits=lambda: None) == 0  # so it has heard that they are done
        over.wait(10)
        over.wait(10)
        if wires.rank == 1:
            deal.done("77/4", [n for n in take if n is not None])
            deal.take("77/5", 1, wait=False, waits=lambda: None)
        over.wait(10)
        over.wait(10)

    together(3, member)
    ((first,), (one, _), (last,)) = seen
    assert (first.loader, first.epoch) == (1, 4)
    (part,) = first.parts
    assert (part.done, part.left, [(loan.rank, loan.batches) for loan in part.lent]) == (0, 0, [(0, 2), (1, 1)])
    (part,) = one.parts
    assert (part.done, [(loan.rank, loan.batches) for loan in part.lent]) == (2, [(1, 1)])
    assert last.epoch == 5
