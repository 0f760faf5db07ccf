"""Rounds with backups over several servers: the same contributors everywhere, whatever comes first and whoever dies."""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, Interrupted
from paceline.server import messages as m
from paceline.server.client import Client, Table
from paceline.server.connection import pair
from paceline.server.placement import Tensor, place
from paceline.server.rounds import Agreement, Rounds
from paceline.server.service import Service
from paceline.server.shard import Shard
from paceline.server.stock import room
from paceline.transport.channel import Channel

SGD: dict[str, Any] = {"lr": 0.5}
TENSORS = [Tensor(f"p{i}", (40 + i, 3), "float32", 0) for i in range(6)]


class Worker:
    """One life of a rank, and what it has said and heard."""

    def __init__(self, rank: int, life: int, servers: int) -> None:
        self.rank, self.life = rank, life
        self.step = 0
        self.rounds = [0] * servers  # that each server's weights were of
        self.due = [0] * servers  # chunks that are still to come
        self.open = servers  # servers that have not answered yet
        self.rests = self.dead = False


class World:
    """Shards, the one who closes rounds, and workers; whatever is said stands in a queue until the test delivers it."""

    def __init__(self, servers: int, backups: int, chance: random.Random, *, replaces: bool = False) -> None:
        placement = place(TENSORS, servers, chunk_bytes=500)
        rule = m.Rule(optimizer="SGD", groups=[SGD], gate=f"sync(backups={backups})")
        self.chance = chance
        self.queues: dict[Any, deque[Callable[[], None]]] = {}
        self.workers: dict[int, Worker] = {}
        self.rounds = Rounds()
        self.shards = [
            Shard(
                placement,
                s,
                rule,
                torch.zeros(room(placement.of(s)), dtype=torch.uint8),
                lambda rank, chunk, s=s: self.send_weights(s, rank),  # type: ignore[misc]
                lambda s=s: self.stands(s),  # type: ignore[misc]
                lambda rank, step, reason, s=s: self.dropped[s].add((rank, step, self.lives[s][rank])),  # type: ignore[misc]
                lambda rank, push, s=s: self.settled[s].append((rank, push.life)),  # type: ignore[misc]
                replaces=replaces,
            )
            for s in range(servers)
        ]
        assert all(len(shard.chunks) > 1 for shard in self.shards)
        self.closed: list[list[tuple[tuple[int, int], ...]]] = [[] for _ in self.shards]
        self.decided: list[m.Closed] = []
        self.settled: list[list[tuple[int, int]]] = [[] for _ in self.shards]  # ranks and lives
        self.lives: list[dict[int, int]] = [{} for _ in self.shards]  # of each rank, as a server knows it
        self.dropped: list[set[tuple[int, int, int]]] = [set() for _ in self.shards]  # rank, step, life
        self.whole: list[set[tuple[int, int, int]]] = [set() for _ in self.shards]
        self.pushed: dict[tuple[int, int, int], set[int]] = {}  # and the rounds of the weights it was made with

    # ---- what is said, and what is done when it is heard

    def queue(self, *key: Any) -> deque[Callable[[], None]]:
        return self.queues.setdefault(key, deque())

    def deliver(self) -> bool:
        """The next thing that anybody has said to somebody; False: nothing is on its way."""
        ready = [queue for queue in self.queues.values() if queue]
        if ready:
            self.chance.choice(ready).popleft()()
        return bool(ready)

    def stands(self, s: int) -> None:
        standing = self.shards[s].standing()

        def heard() -> None:
            if closed := self.rounds.hear(s, standing):
                self.decided.append(closed)
                for to in range(len(self.shards)):
                    self.queue("closed", to).append(lambda to=to: self.close(to, closed))  # type: ignore[misc]

        self.queue("standing", s).append(heard)

    def close(self, s: int, closed: m.Closed) -> None:
        assert closed.round == self.shards[s].round
        self.closed[s].append(closed.contributors)
        self.shards[s].close(closed.contributors)

    def send_weights(self, s: int, rank: int) -> None:
        life, round_ = self.lives[s][rank], self.shards[s].round

        def arrives() -> None:
            worker = self.workers[rank]
            if worker.life == life and not worker.dead:
                worker.due[s] -= 1
                worker.rounds[s] = round_

        self.queue("weights", s, rank).append(arrives)

    # ---- what workers do

    def say(self, worker: Worker, s: int, what: Callable[[], None]) -> None:
        self.queue("worker", worker.rank, s).append(what)

    def join(self, rank: int) -> None:
        life = self.workers[rank].life + 1 if rank in self.workers else 0
        worker = self.workers[rank] = Worker(rank, life, len(self.shards))

        def joined(s: int) -> None:
            self.lives[s][rank] = life
            worker.step = max(worker.step, self.shards[s].join(rank))
            worker.rounds[s] = self.shards[s].round
            worker.open -= 1

        for s in range(len(self.shards)):
            self.say(worker, s, lambda s=s: joined(s))  # type: ignore[misc]

    def can_push(self, worker: Worker) -> bool:
        return not worker.dead and not worker.open and not any(worker.due)

    def push(self, worker: Worker) -> None:
        worker.step += 1
        worker.rests = False
        key = worker.rank, worker.step, worker.life
        self.pushed[key] = set(worker.rounds)
        head = m.Push(
            table=0,
            view=1,
            step=worker.step,
            read=0,
            weight=self.chance.choice([0.5, 1.0]),
            groups=[SGD],
            round=min(worker.rounds),
            life=worker.life,
        )
        value = self.chance.uniform(-1, 1)

        def begins(s: int) -> None:
            if self.shards[s].begin(worker.rank, head):
                self.dropped[s].add(key)

        def comes(s: int, index: int) -> None:
            shard = self.shards[s]
            if index == len(shard.chunks) - 1:
                self.whole[s].add(key)
            shard.part(worker.rank, index, torch.full((shard.chunks[index].numel,), value))

        for s, shard in enumerate(self.shards):
            worker.due[s] = len(shard.chunks)
            self.say(worker, s, lambda s=s: begins(s))  # type: ignore[misc]
            for index in range(len(shard.chunks)):
                self.say(worker, s, lambda s=s, index=index: comes(s, index))  # type: ignore[misc]

    def rest(self, worker: Worker) -> None:
        worker.rests = True
        for s in range(len(self.shards)):
            self.say(worker, s, lambda s=s: self.shards[s].rest(worker.rank))  # type: ignore[misc]

    def die(self, worker: Worker) -> None:
        """Each server gets as much of what it had said as was on its way, and then notices."""
        worker.dead = True
        for s in range(len(self.shards)):
            queue = self.queue("worker", worker.rank, s)
            while queue and self.chance.random() < 0.3:
                queue.pop()
            self.say(worker, s, lambda s=s: self.shards[s].leave(worker.rank))  # type: ignore[misc]

    def forgotten(self, rank: int) -> bool:
        """All servers know that it is gone."""
        return not any(self.queue("worker", rank, s) for s in range(len(self.shards)))

    def run(self, workers: int, events: int) -> None:
        for rank in range(workers):
            self.join(rank)
        while not all(worker.open == 0 for worker in self.workers.values()):
            self.deliver()  # training begins when all have opened the table
        for _ in range(events):
            here = [worker for worker in self.workers.values() if not worker.dead]
            able = [worker for worker in here if self.can_push(worker)]
            dice = self.chance.random()
            if dice < 0.01 and len(here) > 1:
                self.die(self.chance.choice(here))
            elif dice < 0.02:
                rank = self.chance.randrange(workers + 2)  # a late one, or one in the place of a lost one
                if rank not in self.workers or (self.workers[rank].dead and self.forgotten(rank)):
                    self.join(rank)
            elif dice < 0.05 and able:
                self.rest(self.chance.choice(able))
            elif dice < 0.3 and able:
                self.push(self.chance.choice(able))
            else:
                self.deliver()
        self.end()

    def end(self) -> None:
        """All who are here go on to the same number of pushes, and rest: nobody may wait for ever."""
        left = {rank: 3 for rank, worker in self.workers.items() if not worker.dead}
        while True:
            for worker in self.workers.values():
                if self.can_push(worker) and left[worker.rank]:
                    left[worker.rank] -= 1
                    self.push(worker)
                elif self.can_push(worker) and not worker.rests:
                    self.rest(worker)
            if not self.deliver():
                break
        waiting = [worker.rank for worker in self.workers.values() if not worker.dead and not self.can_push(worker)]
        assert not waiting, f"{waiting} wait for ever"

    def check(self) -> None:
        contributors = [closed.contributors for closed in self.decided]
        assert all(closed == contributors for closed in self.closed)
        first = self.shards[0].weights(0, 0)[0]
        for shard in self.shards:
            assert shard.round == shard.version == len(contributors)
            assert shard.applied == sum(map(len, contributors))
            for index in range(len(shard.chunks)):  # one value, bit for bit: what was summed was the same
                assert (shard.weights(0, index) == first).all()
        for key, rounds in self.pushed.items():
            told = [key in dropped for dropped in self.dropped]
            if not all(key in whole for whole in self.whole):
                continue  # its worker died meanwhile
            worker = self.workers[key[0]]
            if not worker.dead and worker.life == key[2]:
                assert all(told) or not any(told), f"{key} was dropped by some"
                assert all(told) or len(rounds) == 1, f"{key} was made with weights of {rounds}, and counted"
        alive = [key for key in self.pushed if self.workers[key[0]].life == key[2] and not self.workers[key[0]].dead]
        lost = sum(map(len, contributors)) - sum(key not in self.dropped[0] for key in alive)
        assert 0 <= lost <= len(self.pushed) - len(alive)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    servers=st.integers(1, 4),
    workers=st.integers(1, 5),
    backups=st.integers(1, 3),
    events=st.integers(50, 700),
)
def test_all_servers_close_rounds_alike(seed: int, servers: int, workers: int, backups: int, events: int) -> None:
    world = World(servers, backups, random.Random(seed))
    world.run(workers, events)
    world.check()


def standing(**changes: Any) -> m.Standing:
    fields: dict[str, Any] = {
        "table": 0, "servers": 2, "round": 0, "backups": 1, "here": (0, 1, 2), "resting": (), "whole": (),
    }  # fmt: skip
    fields |= changes
    return m.Standing(**fields | {"whole": tuple((rank, 5) for rank in fields["whole"])})


def test_a_worker_that_only_some_servers_have_heard_is_neither_waited_for_nor_counted() -> None:
    rounds = Rounds()
    assert rounds.hear(0, standing(whole=(0, 2))) is None
    assert rounds.hear(1, standing(whole=(0,))) is None
    assert rounds.hear(1, standing(whole=(0,), here=(0, 1))) is None  # 2 died on its way to server 1
    assert rounds.hear(0, standing(whole=(0, 1, 2))) is None
    assert rounds.hear(1, standing(whole=(0, 1), here=(0, 1))) == m.Closed(0, 0, ((0, 5), (1, 5)))
    assert rounds.hear(0, standing(whole=(0, 2))) is None  # of a round that is over


def test_a_round_waits_for_its_number_on_every_server() -> None:
    rounds = Rounds()
    assert rounds.hear(0, standing(whole=(0, 1, 2))) is None
    assert rounds.hear(1, standing(whole=(1,))) is None
    assert rounds.hear(1, standing(whole=(1, 2))) == m.Closed(0, 0, ((1, 5), (2, 5)))


# ---- over sockets


class Place:
    """Servers that agree over sockets, and workers."""

    def __init__(self, workers: int, servers: int) -> None:
        lines = [socket.socketpair() for _ in range(servers - 1)]
        self.ours = [Channel(here, f"server {i + 1}") for i, (here, _) in enumerate(lines)]
        self.theirs = [Channel(there, "server 0") for _, there in lines]
        agreements = [Agreement(0, self.ours), *(Agreement(i + 1, [c]) for i, c in enumerate(self.theirs))]
        self.services = [Service(limit_s=10, agreement=agreement) for agreement in agreements]
        self.clients = [self._join(rank) for rank in range(workers)]

    def _join(self, rank: int) -> Client:
        ends = [pair(rank, shared=rank % 2 == 0) for _ in self.services]
        for service, (theirs, _) in zip(self.services, ends):
            service.attach(theirs)
        return Client(rank, [mine for _, mine in ends], limit_s=10)

    def open(self, gate: str = "sync(backups=1)") -> list[Table]:
        rule = m.Rule(optimizer="SGD", groups=[SGD], gate=gate)
        tables = [client.open([(t, torch.zeros(t.shape)) for t in TENSORS], rule) for client in self.clients]
        tables[0].store()
        for table in tables:
            table.pull()
        return tables

    def standing(self, server: int) -> m.Standing:
        with self.services[server]._shards:
            return self.services[server].tables[0].shard.standing()

    def kill(self, rank: int) -> None:
        for port in self.clients.pop(rank).ports:
            port._channel.close()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for service in self.services:
            service.close()


@contextmanager
def a_place(workers: int, servers: int) -> Iterator[Place]:
    made = Place(workers, servers)
    try:
        yield made
    finally:
        made.close()


def _soon(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def steps(table: Table, count: int) -> None:
    for _ in range(count):
        table.push([torch.ones(t.shape) for t in TENSORS], [SGD])


def test_servers_go_on_without_the_slowest_and_tell_it_what_was_dropped() -> None:
    with a_place(2, 3) as here:
        fast, slow = here.open()
        steps(fast, 3)  # the other is the backup
        steps(slow, 1)
        assert list(slow.dropped) == [1]
        assert not fast.dropped
        steps(slow, 2)  # and now it is the first
        assert list(slow.dropped) == [1]
        told = [service.readings() for service in here.services]
        assert told == [{"applied": 5.0, "dropped": 1.0, "halves": 0.0, "version": 5.0}] * 3


def test_a_worker_that_dies_when_some_servers_have_its_push_is_not_counted() -> None:
    with a_place(3, 2) as here:
        tables = here.open()
        parts = [torch.ones(t.shape).view(-1) for t in TENSORS]
        part = tables[2]._parts[0]
        head = m.Push(table=0, view=1, step=1, read=part.version, weight=1.0, groups=[SGD])
        part.push(head, parts)  # type: ignore[arg-type]
        assert _soon(lambda: here.standing(0).whole == ((2, 0),))
        here.kill(2)
        assert _soon(lambda: 2 not in here.standing(0).here)
        with ThreadPoolExecutor() as pool:  # the lost one was the backup: both others are needed
            for done in [pool.submit(steps, table, 1) for table in tables[:2]]:
                done.result(30)
        told = [service.readings()["applied"] for service in here.services]
        assert told == [2.0, 2.0]
        assert all(torch.equal(s.parameter, torch.full(s.parameter.shape, -0.5)) for s in tables[0].slots)


def test_the_gate_turns_to_rounds_with_backups_and_away() -> None:
    with a_place(2, 2) as here:
        tables = here.open("async")
        steps(tables[0], 3)
        for gate in ("sync(backups=1)", "bounded(staleness=9)", "sync(backups=1)"):
            tables[0].turn(gate)
            for table in tables:
                table.pull()
            steps(tables[1], 2)
        assert not tables[1].dropped
        assert [service.readings()["applied"] for service in here.services] == [9.0, 9.0]


def test_servers_that_lose_each_other_say_so() -> None:
    with a_place(2, 2) as here:
        tables = here.open()
        steps(tables[0], 1)
        here.ours[0].close()
        with pytest.raises(Interrupted, match="rounds are closed by all servers together"):
            steps(tables[0], 2)


def test_servers_that_do_not_know_each_other_close_no_rounds() -> None:
    with a_place(1, 2) as here:
        here.services[0].agreement._channels.clear()
        with pytest.raises(ConfigError, match="does not know the others"):
            here.open()


def test_a_server_that_holds_nothing_of_a_table_is_left_out() -> None:
    with a_place(2, 3) as here:
        rule = m.Rule(optimizer="SGD", groups=[SGD], gate="sync(backups=1)")
        one = Tensor("p", (4,), "float32", 0)
        tables = [client.open([(one, torch.zeros(4))], rule) for client in here.clients]
        for _ in range(3):
            tables[1].push([torch.ones(4)], [SGD])
        assert torch.equal(tables[1].slots[0].parameter, torch.full((4,), -1.5))


def test_a_lost_worker_counts_against_the_backups() -> None:
    def standing(number: int, here: tuple[int, ...], *whole: tuple[int, int]) -> m.Standing:
        return m.Standing(table=0, servers=1, round=number, backups=1, here=here, resting=(), whole=whole)

    rounds = Rounds()
    assert rounds.hear(0, standing(0, (0, 1, 2), (0, 1))) is None
    assert rounds.hear(0, standing(0, (0, 1, 2), (0, 1), (1, 1)))
    assert rounds.hear(0, standing(1, (0, 2), (0, 2))) is None  # the one backup is lost: both others are needed
    assert rounds.hear(0, standing(1, (0, 2), (0, 2), (2, 2)))
    assert rounds.hear(0, standing(2, (2,), (2, 3)))  # never more than there are
