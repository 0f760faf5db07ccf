"""Starts an elastic run: a scheduler, and a crew of members on this host that it lets come and go.

The thread of the job starts all processes and watches them: the scheduler's, which `keeper` starts again when it ends,
and the members', which `crew` starts and ends at the scheduler's orders. Training goes on while there is no scheduler;
only changes wait for it.

Other hosts take part where the scheduler listens on an address that they reach: an agent there (`joined`) asks for the
work and starts members too, whoever started it: a user, or `posts`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.core import lost
from paceline.core.directory import write_private
from paceline.core.errors import PacelineError
from paceline.core.settings import Settings
from paceline.environment import this_host
from paceline.environment.paceline import VARIABLES
from paceline.launch import reach, record
from paceline.launch.finishing import made_good, with_last_words
from paceline.launch.ground import Keeping
from paceline.launch.keeper import Keeper
from paceline.launch.kit import Kit, work_of
from paceline.launch.plan import told
from paceline.launch.posts import Posts
from paceline.launch.recorded import RecordedJob
from paceline.launch.spec import Elastic, JobSpec
from paceline.launch.story import Story, Waits
from paceline.membership.agent import Outcome
from paceline.membership.agent_line import AgentLine
from paceline.membership.crew import Crew
from paceline.membership.orders import FromAgent, Host, Over
from paceline.membership.process import Show, Start
from paceline.membership.scheduler import Parameters
from paceline.membership.watch import Watch

DRAIN_S = 10.0  # that members have to leave after SIGTERM
_PARAMETERS = "scheduler-parameters.json"
_HELD_S = 180.0  # for the lock of a launcher in a pod that is gone
_IDLE_S = 60.0  # without a member, beyond what hosts have to come: the scheduler should have ended the run


class ElasticJob(RecordedJob):
    """An elastic run. Its members on this host end when this process does, however it ends.

    Args:
        say: gets a line when a member is lost, replaced or joins.
    """

    def __init__(
        self,
        spec: JobSpec,
        elastic: Elastic,
        show: Show,
        *,
        notice_s: float = 3.0,
        grace_s: float = 5.0,
        drain_s: float = DRAIN_S,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._spec = spec
        self._elastic = elastic
        self._show = show
        self._say = say
        self.token = spec.token or secrets.token_hex(32)
        self._kit = Kit(spec, self.token, elastic.own_slots)  # what cannot be started leaves no directory behind
        if spec.submission:  # started again, perhaps on another host than the launcher that was lost
            record.await_end(Path(spec.settings.root, spec.settings.name), _HELD_S, say)
        self._record = record.Record(spec.settings, spec.script, spec.size, elastic.least, spec.submission)
        self.settings: Settings = told(spec, self._record)
        self._losses: list[lost.Lost] = []
        lost.write(self.dir, ())
        self._story: Story | None = None
        self._line: AgentLine | None = None
        self._posts: Posts | None = None
        self._others_s = drain_s + notice_s + grace_s + 1.0  # within which agents of other hosts are done
        self._crew = Crew(
            self._kit.means(self.dir / "logs"),
            show,
            report=self._report,
            drain_s=drain_s,
            notice_s=notice_s,
            grace_s=grace_s,
            on_started=lambda id, pid: self._note(),
            on_lost=self._lost,
        )
        self._kit.running = lambda: self._crew.running
        self._start()

    @property
    def pids(self) -> list[int]:
        """The members' process numbers, by id; 0 for one that does not run now."""
        running = self._crew.running
        return [running.get(id, 0) for id in range(self._spec.size)] if running else []

    @property
    def met(self) -> bool:
        """Whether members have come to the scheduler: a script that never joins is as many plain scripts."""
        return self._story is not None and self._story.met

    @property
    def reason(self) -> str:
        """Why the run could not go on; "": it could."""
        return self._crew.over or ""

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._line and self._elastic.listen:
            self._line.end_run(drain=number == signal.SIGTERM and not self._crew.stopped_by)
        self._crew.stop(number)

    def kill(self, id: int, number: int) -> None:
        """Send a signal to one member and what it started."""
        self._crew.kill(id, number)

    def resize(self) -> None:
        self._crew.resize()

    # ---- in the job's thread

    def _close(self) -> None:
        reach.remove(self.dir)
        (self.dir / _PARAMETERS).unlink(missing_ok=True)

    def _work(self) -> Outcome:
        keeper = self._keeper()
        idle_since, idle_limit_s = time.monotonic(), self.settings.join_limit_s + _IDLE_S
        try:
            with Watch() as watch:
                while not self._crew.gone:
                    ended = watch.turn()
                    if self._crew.over is None:  # after that it may end
                        keeper.turn(watch, ended)
                    self._hear()
                    self._crew.turn(watch, ended)
                    if self._crew.running or self._others:
                        idle_since = time.monotonic()
                    elif keeper.gave_up:
                        self._crew.obey(Over(0, "" if self._crew.well else keeper.gave_up))
                    elif time.monotonic() - idle_since > idle_limit_s:
                        raise PacelineError(
                            f"no member runs, and for {idle_limit_s:g} s the scheduler has neither started one nor "
                            f"ended the run: see {self.dir / 'logs' / 'scheduler.log'}"
                        )
                self._settle(watch)
                deadline = time.monotonic() + self._others_s
                while self._others and time.monotonic() < deadline:
                    keeper.turn(watch, watch.turn())
                if self._story:
                    self._story.close()
                keeper.end(watch)
        finally:
            if self._story:
                self._story.close()
            if self._line:
                self._line.close()
            if self._posts:
                self._posts.close()
            if self._elastic.ground:
                self._elastic.ground.close()
        outcome = with_last_words(replace(self._crew.outcome(), unfinished=bool(self.reason)), self.dir)
        if self._crew.over == "" and not outcome.stopped_by:
            outcome = made_good(outcome, self.dir, self._record.run.started, self._crew.over_at, self._say)
        return outcome

    @property
    def _others(self) -> bool:
        """Whether members run on other hosts, as far as is known."""
        picture = self._story.newest if self._story else None
        return picture is not None and any(site.running for site in picture.hosts if site.name != self._own_name)

    @property
    def _own_name(self) -> str:
        """Without slots another one: this host may have an agent too, as each node of an allocation has."""
        return this_host() if self._elastic.own_slots else f"{this_host()} (launcher)"

    def _settle(self, watch: Watch) -> None:
        """Read the members' last words."""
        while any(process.rank >= 0 for process in watch.processes):
            watch.turn()

    def _keeper(self) -> Keeping:
        told = self._parameters()
        if ground := self._elastic.ground:
            return ground.keeper(told, self.token, self._scheduled, self._say)
        log = self.dir / "logs" / "scheduler.log"
        return Keeper(
            self._scheduler(told),
            self._show,
            log,
            on_started=self._scheduled,
            say=self._say,
            silence_s=self._elastic.silence_s,
        )

    def _parameters(self) -> Parameters:
        journal = self.dir / "scheduler.sqlite"
        for old in self.dir.glob(f"{journal.name}*"):  # of an earlier run of this name: its members are gone
            old.unlink(missing_ok=True)
        return Parameters(
            journal=str(journal.absolute()),
            least=self._elastic.least,
            target=self._spec.num_members,
            most=self._elastic.most,
            settings=self.settings,
            silence_s=self._elastic.silence_s,
            replacements=self._elastic.replacements,
            begin=self._elastic.begin,
            host=self._elastic.listen or "127.0.0.1",
            port=self._elastic.port,
            work=work_of(self._spec, self.settings) if self._elastic.listen else None,
        )

    def _scheduler(self, parameters: Parameters) -> Start:
        file = (self.dir / _PARAMETERS).absolute()
        write_private(file, msgspec.json.encode(parameters))
        command = (sys.executable, "-P", "-m", "paceline.membership.scheduler", str(file))
        inherited = {k: v for k, v in os.environ.items() if k not in VARIABLES}
        return Start(rank=-1, command=command, env=inherited | {"PACELINE_TOKEN": self.token})

    def _scheduled(self, address: str, pid: int) -> None:
        """The scheduler runs, or runs again; its address is always the same."""
        with contextlib.suppress(OSError):
            self._record.scheduled(address, pid)
        if self._line:
            return
        where = reach.Reach(address=address, token=self.token)
        reach.write(self.dir, where)
        self._kit.reach(address)
        waits = Waits(self._hosts, self._elastic.begin, self.settings.join_limit_s)
        self._story = Story(
            address, self.token, self._elastic.replacements, self._say, waits, lambda: self._crew.stopped_by
        )
        host = Host(name=self._own_name, slots=self._elastic.own_slots)
        self._line = AgentLine(address, self.token, host, limit_s=self.settings.join_limit_s)
        if self._elastic.hosts or self._elastic.ground:
            self._posts = Posts(
                self._elastic, where, self._show, self._say, lambda: self._crew.ending, self.dir / "logs"
            )
        elif self._elastic.listen:
            self._say(f"other hosts join with: paceline agent --join {self.dir.absolute() / reach.FILE}")

    def _hosts(self) -> list[str]:
        """The other hosts that the run is to have."""
        return self._posts.hosts if self._posts else []

    def _hear(self) -> None:
        """Pass on what the scheduler wants."""
        with contextlib.suppress(queue.Empty):
            while self._line:
                self._crew.obey(self._line.orders.get_nowait())

    def _note(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop the others
            self._record.started(self.pids)

    def _report(self, message: FromAgent) -> None:
        if self._line:
            self._line.report(message)

    def _lost(self, id: int, code: int) -> None:
        self._losses.append(lost.Lost(rank=id, how=lost.how(code), at=time.time()))
        with contextlib.suppress(OSError):  # a full disk must not stop the others
            lost.write(self.dir, self._losses)
