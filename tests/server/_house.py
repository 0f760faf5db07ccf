"""A run with desks, over real sockets: servers, and workers that push."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import PacelineError
from paceline.core.status import Status
from paceline.core.view import View
from paceline.server import messages as m
from paceline.server.client import Client, Table
from paceline.server.connection import pair
from paceline.server.outside.desk import Desk
from paceline.server.placement import Tensor
from paceline.server.service import Service
from paceline.transport.wires import Wires

TOKEN = "a token that only this test knows"
SHAPES = [(1500, 1000), (7,), (1500, 1000), ()]  # several chunks, so that steps can be half applied


class House:
    """Servers with desks, and workers."""

    def __init__(self, directory: Path, workers: int, servers: int, gate: str) -> None:
        self.directory = directory
        self.wires = [Wires(TOKEN) for _ in range(servers)]
        view = View(number=1, members=tuple(w.describe(r, f"host{r}") for r, w in enumerate(self.wires)))
        self.services = [Service(limit_s=60) for _ in range(servers)]
        self.desks = []
        for rank, (wires, service) in enumerate(zip(self.wires, self.services)):
            wires.join(view, rank, limit_s=10, status=Status(None))
            desk = Desk(
                wires,
                range(servers),
                directory=directory,
                token=TOKEN,
                strategy=gate,
                service=lambda service=service: service,  # type: ignore[misc]
            )
            self.desks.append(desk)
        self.clients = []
        for rank in range(workers):
            ends = [pair(rank, shared=False) for _ in self.services]
            for service, (theirs, _) in zip(self.services, ends):
                service.attach(theirs)
            self.clients.append(Client(rank, [mine for _, mine in ends], limit_s=60))
        self.gate = gate

    def open(self, values: float = 0.0, tensors: Sequence[Tensor] = ()) -> list[Table]:
        tensors = tensors or [Tensor(f"p{i}", shape, "float32", 0) for i, shape in enumerate(SHAPES)]
        rule = m.Rule(optimizer="SGD", groups=[{"lr": 1.0}], gate=self.gate)
        tables = [
            c.open([(t, torch.full(t.shape, values, dtype=t.torch_dtype)) for t in tensors], rule) for c in self.clients
        ]
        tables[0].store()
        for table in tables:
            table.pull()
        return tables

    @property
    def address(self) -> str:
        return self.wires[0].view.members[0].address

    def close(self) -> None:
        for client in self.clients:
            with contextlib.suppress(PacelineError):
                client.close()
        for desk, service, wires in zip(self.desks, self.services, self.wires):
            desk.close()
            service.close()
            wires.close()


@contextlib.contextmanager
def house(directory: Path, workers: int = 1, servers: int = 1, gate: str = "sync") -> Iterator[House]:
    made = House(directory, workers, servers, gate)
    try:
        yield made
    finally:
        made.close()


def push(table: Table, value: float = -1.0) -> None:
    """With a rate of one, all weights rise by -value."""
    gradients = [torch.full(slot.parameter.shape, value) for slot in table.slots]
    table.push(gradients, [{"lr": 1.0}], weight=1.0)


@contextlib.contextmanager
def training(tables: list[Table]) -> Iterator[list[int]]:
    """All workers push for as long as the block lasts; how often each has."""
    stop, counts = threading.Event(), [0] * len(tables)
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            while not stop.is_set() and not failures:
                push(tables[i])
                counts[i] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(tables))]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    if failures:
        raise failures[0]


def until(ready: Any, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)
