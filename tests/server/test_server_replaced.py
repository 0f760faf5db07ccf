"""Sync whose lost workers are replaced: no push of one who lives is dropped, and what is settled is what is applied."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from test_server_rounds import Worker, World

from paceline.server import messages as m


class Replaced(World):
    """Workers come late, rest until they have a batch, and then get the weights of now (`Table.catch_up`)."""

    def __init__(self, servers: int, chance: random.Random) -> None:
        super().__init__(servers, 0, chance, replaces=True)
        self.waking: set[int] = set()
        self.begun = False

    def stands(self, s: int) -> None:
        """The first server decides: it hears itself at once, and closes its own rounds in the same moment."""
        standing = self.shards[s].standing()
        if s:
            self.queue("standing", s).append(lambda: self.hear(s, standing))
        else:
            self.hear(0, standing)

    def hear(self, s: int, standing: m.Standing) -> None:
        if closed := self.rounds.hear(s, standing):
            self.decided.append(closed)
            for to in range(1, len(self.shards)):
                self.queue("closed", to).append(lambda to=to: self.close(to, closed))  # type: ignore[misc]
            self.close(0, closed)

    def join(self, rank: int) -> None:
        super().join(rank)
        if self.begun:
            self.rest(self.workers[rank])

    def can_push(self, worker: Worker) -> bool:
        self.begun = True
        return super().can_push(worker) and worker.rank not in self.waking

    def push(self, worker: Worker) -> None:
        if not worker.rests:
            super().push(worker)
            return
        self.waking.add(worker.rank)
        self.pull(worker, 0, lambda: self.pull_all(worker))

    def pull_all(self, worker: Worker) -> None:
        missing = set(range(len(self.shards)))

        def arrived(s: int) -> None:
            missing.discard(s)
            if missing:
                return
            if len(set(worker.rounds)) > 1:
                self.pull_all(worker)
            else:
                worker.rests = False
                self.waking.discard(worker.rank)

        for s in range(len(self.shards)):
            self.pull(worker, s, lambda s=s: arrived(s))  # type: ignore[misc]

    def pull(self, worker: Worker, s: int, then: Callable[[], None]) -> None:
        def asked() -> None:
            self.shards[s].pulls(worker.rank)
            round_ = self.shards[s].round

            def answered() -> None:
                if not worker.dead:
                    worker.rounds[s] = round_
                    then()

            self.queue("weights", s, worker.rank).append(answered)

        self.say(worker, s, asked)

    def die(self, worker: Worker) -> None:
        super().die(worker)
        self.waking.discard(worker.rank)

    def check(self) -> None:
        super().check()
        for rank, _, life in set.union(*self.dropped):  # only of those who died before all servers knew
            assert self.workers[rank].dead or self.workers[rank].life != life
        contributors = Counter(each for closed in self.decided for each in closed.contributors)
        assert Counter(self.settled[0]) == contributors


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), servers=st.integers(1, 4), workers=st.integers(1, 5), events=st.integers(50, 700))
def test_every_push_of_one_who_lives_counts(seed: int, servers: int, workers: int, events: int) -> None:
    world = Replaced(servers, random.Random(seed))
    world.run(workers, events)
    world.check()
