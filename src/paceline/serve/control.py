"""What is asked of the parent over HTTP: versions and orders, counts, status, and samples for the run.

A replica that gets such a request passes it up (`messages`), `house` brings it here with the counts of now, and the
answer goes back the same way. Orders wait for the keeper in a thread, so that connections are taken meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from paceline.core.errors import PacelineError
from paceline.serve import counts
from paceline.serve import learner as learning
from paceline.serve.counts import Counts
from paceline.serve.keeper import Keeper, Standing
from paceline.serve.learner import Learner
from paceline.serve.messages import Ask, Learn
from paceline.serve.predict import refusal
from paceline.serve.record import Record, Status, totals
from paceline.serve.refused import Refused
from paceline.serve.settings import JSON

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
Said = tuple[int, str, bytes]  # status, kind, body


class Tally(NamedTuple):
    """What the replicas have come to by now."""

    counts: Counts  # summed, with those of replicas that have ended
    replicas: dict[str, int]  # how many are ready, starting, down
    starts: int


class Control:
    """See the module. `name` is that of what is served; without a `learner` it is no run."""

    def __init__(self, name: str, keeper: Keeper, learner: Learner | None) -> None:
        self._name = name
        self._keeper = keeper
        self._learner = learner
        self._record = Record()

    async def write_down(self, summed: Counts) -> None:
        """Once a second, for the page."""
        try:
            standing = await asyncio.to_thread(self._keeper.state)
        except PacelineError:  # whoever asks is told
            return
        served = [version.metric for version in standing.versions if version.number == standing.current]
        self._record.add(time.time(), summed, served[0] if served else None)

    async def reply(self, asked: Ask | Learn, tally: Tally) -> Said:
        """The answer; what cannot be done says why."""
        try:
            return await self._answer(asked, tally) if isinstance(asked, Ask) else self._learn(asked)
        except (PacelineError, Refused) as error:
            answer = refusal(error if isinstance(error, Refused) else Refused(409, str(error)))
            return answer.status, answer.kind, answer.body

    def _learn(self, learn: Learn) -> Said:
        if self._learner is None:
            raise Refused(409, "what is served is no run, so nothing can learn: serve a run by its name or directory")
        waiting = self._learner.put(learn.samples).waiting
        return 202, JSON, msgspec.json.encode({"taken": len(learn.samples), "waiting": waiting})

    async def _answer(self, ask: Ask, tally: Tally) -> Said:
        if ask.what == "metrics":
            return 200, _PROMETHEUS, self._metrics(tally).encode()
        keeper = self._keeper
        orders: dict[str, Callable[[], object]] = {
            "versions": lambda: None,
            "status": lambda: None,
            "pin": functools.partial(keeper.pin, ask.version or 0),
            "unpin": keeper.unpin,
            "pause": keeper.pause,
            "resume": keeper.resume,
            "rollback": keeper.roll_back,
        }
        await asyncio.to_thread(orders[ask.what])
        standing = await asyncio.to_thread(keeper.state)
        return 200, JSON, msgspec.json.encode(self._status(standing, tally) if ask.what == "status" else standing)

    def _status(self, standing: Standing, tally: Tally) -> Status:
        answered, refused = totals(tally.counts)
        return Status(
            name=self._name,
            now=time.time(),
            standing=msgspec.structs.replace(standing, metrics=[]),  # the record has them, second by second
            seconds=self._record.columns(),
            replicas=tally.replicas,
            answered=answered,
            refused=refused,
            learning=self._learner.state() if self._learner else None,
        )

    def _metrics(self, tally: Tally) -> str:
        told = counts.text(tally.counts, tally.replicas, tally.starts)
        return told + learning.text(self._learner.state()) if self._learner else told
