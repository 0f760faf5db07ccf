"""Keeps the scheduler's actor: Ray starts it again where its process ends, and the launcher hears of it.

It is bound to the launcher's node, where its journal is, so that it comes back at the same address: members and agents
need only redial. It does not outlive that node; neither does the launcher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.core.on_ray import SCHEDULER
from paceline.launch.on_ray.actors import SchedulerActor
from paceline.launch.on_ray.post import first_line
from paceline.membership.process import Process
from paceline.membership.scheduler import Parameters
from paceline.membership.watch import Watch

_LOOK_S = 0.5
_RESTARTS = 100
_END_S = 5.0


class ActorKeeper:
    """See `launch.keeper.Keeper`, whose place it takes."""

    def __init__(
        self,
        told: Parameters,
        token: str,
        node: str,
        *,
        on_started: Callable[[str, int], None],
        say: Callable[[str], None],
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._on_started, self._say = on_started, say
        self._pid = 0
        self._away = False
        self.gave_up = ""
        made = ray.remote(SchedulerActor).options(
            name=SCHEDULER,
            num_cpus=0,
            max_restarts=_RESTARTS,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        self._actor: Any = made.remote(msgspec.json.encode(told), token)
        self._asked: Any = self._actor.where.remote()

    def turn(self, watch: Watch, ended: list[Process]) -> None:
        """Called with each turn of the watch."""
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        if self.gave_up or not ray.wait([self._asked], timeout=0)[0]:
            return
        try:
            address, pid = ray.get(self._asked)
        except ActorUnavailableError:
            if not self._away:
                self._away = True
                self._say("the scheduler ended; Ray starts it again, and the members go on meanwhile")
        except ActorDiedError as error:
            self.gave_up = (
                f"Ray does not start the scheduler any more, so members that are lost now are not replaced: "
                f"{first_line(error)}"
            )
            self._say(f"error: {self.gave_up}")
            return
        else:
            if pid != self._pid:
                if self._pid:
                    self._say(f"the scheduler is back (process {pid})")
                self._pid, self._away = pid, False
                self._on_started(address, pid)
        self._asked = self._actor.where.remote(_LOOK_S)

    def end(self, watch: Watch) -> None:
        """End it; it is not started again."""
        import ray

        with contextlib.suppress(Exception):  # gone already, whatever Ray calls that
            ray.get(self._actor.close.remote(), timeout=_END_S)
        with contextlib.suppress(Exception):
            ray.kill(self._actor)
