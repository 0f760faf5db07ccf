"""What the members of an elastic run are made of, on one host: the launcher's, or one that joined.

Paths and arguments are those of the launcher; environment, interpreter and the share of the cores are the host's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.environment.paceline import VARIABLES
from paceline.launch import standby
from paceline.launch.plan import environment, plan
from paceline.launch.spec import Elastic, JobSpec
from paceline.membership.crew import Means
from paceline.membership.orders import Work
from paceline.membership.process import Start


class Kit:
    """Makes members for `slots` places. A script that cannot be started is refused here."""

    def __init__(self, spec: JobSpec, token: str, slots: int) -> None:
        assert spec.elastic
        self._spec = spec
        self._token = token
        self._slots = max(1, slots)
        self._starts = plan(spec, "", token, slots=self._slots)
        self._index: dict[int, int] = {}  # place on this host, by id
        self.running: Callable[[], Iterable[int]] = lambda: ()  # ids

    def reach(self, address: str) -> None:
        """The scheduler is there."""
        self._starts = plan(self._spec, address, self._token, slots=self._slots)

    def means(self, logs: Path) -> Means:
        """For a crew."""
        assert self._spec.elastic
        return Means(
            start=self._member,
            standby=self._standby() if self._spec.elastic.standbys else None,
            order=self._order,
            standbys=self._spec.elastic.standbys,
            logs=logs,
        )

    def _member(self, id: int, first: bool) -> Start:
        start = self._starts[id]
        env = {**start.env, "PACELINE_LOCAL_RANK": str(self._place(id))}
        return replace(start, env=env, terminal=start.terminal and first)

    def _standby(self) -> Start:
        # By the token what is left behind is found.
        env = environment(self._spec, self._slots) | {"PACELINE_TOKEN": self._token}
        return Start(rank=-1, command=standby.command(self._spec.python), env=env, cwd=self._spec.cwd, waits=True)

    def _order(self, id: int) -> bytes:
        env = self._member(id, False).env
        own = {name: env[name] for name in VARIABLES if name in env}
        spec = self._spec
        return standby.encode(standby.Order(script=spec.script, args=spec.args, module=spec.module, env=own))

    def _place(self, id: int) -> int:
        """A place that no other one on this host has: it decides about the GPU."""
        taken = {self._index[other] for other in self.running() if other != id and other in self._index}
        free = [place for place in (id, *range(self._slots)) if place < self._slots and place not in taken]
        self._index[id] = free[0] if free else id % self._slots
        return self._index[id]


def work_of(spec: JobSpec, settings: Settings) -> Work:
    """What other hosts are told of a run."""
    assert spec.elastic
    return Work(
        script=spec.script,
        args=spec.args,
        module=spec.module,
        cwd=str(Path(spec.cwd or Path.cwd()).absolute()),
        env=dict(spec.env),
        threads=spec.threads,
        most=spec.elastic.most,
        standbys=spec.elastic.standbys,
        settings=settings,
    )


def spec_of(work: Work, labels: tuple[str, ...] = ()) -> JobSpec:
    """The run as a host that joins starts its members."""
    if not Path(work.cwd).is_dir():
        raise ConfigError(
            f"the run's working directory {work.cwd!r} does not exist on this host: paths must be the same"
        )
    return JobSpec(
        script=work.script,
        args=work.args,
        module=work.module,
        num_members=work.most,
        settings=work.settings,
        threads=work.threads,
        elastic=Elastic(least=1, most=work.most, standbys=work.standbys),
        labels=labels,
        env=work.env,
        cwd=work.cwd,
        python=sys.executable,
    )
