"""A host that joined an elastic run: an agent of its own, which starts members there at the scheduler's orders.

It asks the scheduler what members are made of, beats, and ends when the run is over, when it is told to drain, or when
it does not reach the scheduler. Members wait for that themselves, and say so when they give up: in a collective for
`wait_limit_s`, then as long for a view. Then the agent ends too. Its members end with it, however it ends.
"""

from __future__ import annotations

import contextlib
import queue
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.core.errors import ConfigError
from paceline.environment.paceline import TOGETHER
from paceline.launch import reach
from paceline.launch.kit import Kit, spec_of
from paceline.launch.reach import Reach
from paceline.membership.agent_line import AgentLine, fetch
from paceline.membership.crew import Crew
from paceline.membership.orders import FromAgent, Host, Over
from paceline.membership.process import Show
from paceline.membership.watch import Watch

APART = "(not on the launcher's disk)"  # said by an agent whose logs the launcher cannot read
_SLACK_S = 15.0  # for members to find out whom they cannot reach


class JoinedHost:
    """This host, as `name` and with room for `slots` members. `run` works in the thread that calls it.

    Args:
        labels: of the members here.
        cwd: of the members; "": the launcher's.
        together: who ends this host ends all of them: SIGTERM is the run's, whose members leave at the same step.
        say: gets what happens here, in a line.
    """

    def __init__(
        self,
        where: Reach,
        name: str,
        slots: int,
        show: Show,
        *,
        labels: tuple[str, ...] = (),
        cwd: str = "",
        together: bool = False,
        drain_s: float = 10.0,
        notice_s: float = 3.0,
        grace_s: float = 5.0,
        limit_s: float = 30.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._where = where
        self._together = together
        self._say = say
        work = fetch(where.address, where.token, limit_s)
        work = msgspec.structs.replace(work, cwd=cwd or work.cwd)
        self.slots = min(slots, work.most)
        self.dir = Path(work.settings.root) / work.settings.name
        self._limit_s = work.settings.wait_limit_s
        spec = spec_of(work, labels)
        spec = replace(spec, env={**spec.env, TOGETHER: "1"}) if together else spec
        kit = Kit(spec, where.token, self.slots)
        kit.reach(where.address)
        self._crew = Crew(
            kit.means(self.dir / "logs"),
            show,
            report=self._report,
            drain_s=drain_s,
            notice_s=notice_s,
            grace_s=grace_s,
        )
        kit.running = lambda: self._crew.running
        self._line: AgentLine | None = None
        self._host = Host(name=name, slots=self.slots)
        self._join_limit_s = limit_s

    @property
    def apart(self) -> bool:
        """Whether the run's directory here is another one than the launcher's."""
        try:
            found = reach.read(self.dir)
        except ConfigError:
            return True
        return found is None or found.token != self._where.token

    @property
    def running(self) -> dict[int, int]:
        """Process numbers of the members here, by id."""
        return self._crew.running

    @property
    def reason(self) -> str:
        """Why it could not go on; "": the run has finished, or this host was drained."""
        return self._crew.over or ""

    def stop(self, number: int = signal.SIGTERM) -> None:
        """SIGTERM: drain; any other: end the members at once; a second time: kill them. From any thread."""
        if self._together and number == signal.SIGTERM and self._line:
            self._together = False  # the next one is for this host
            self._line.end_run(drain=True)
        else:
            self._crew.stop(number)

    def drain(self) -> None:
        """This host alone, whoever a signal is for; nothing where it stops already."""
        if not self._crew.stopped_by:
            self._crew.stop(signal.SIGTERM)

    def run(self) -> int:
        """Until the run is over or this host is; the exit code."""
        crew = self._crew
        with (
            AgentLine(self._where.address, self._where.token, self._host, self._join_limit_s) as line,
            Watch() as watch,
        ):
            self._line = line
            while not crew.gone:
                ended = watch.turn()
                with contextlib.suppress(queue.Empty):
                    while True:
                        crew.obey(line.orders.get_nowait())
                crew.turn(watch, ended)
                limit_s = 2 * self._limit_s + _SLACK_S if crew.running else self._limit_s
                if line.down_s > limit_s and crew.over is None:
                    crew.obey(Over(0, f"the scheduler was not reached for {line.down_s:.1f} s"))
            while any(process.rank >= 0 for process in watch.processes):  # their last words
                watch.turn()
        if crew.over == "":
            return 0
        return 128 + crew.stopped_by if crew.stopped_by else 1

    def _report(self, message: FromAgent) -> None:
        if self._line:
            self._line.report(message)
