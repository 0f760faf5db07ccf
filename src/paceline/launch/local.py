"""Starts a run on this host: a rendezvous, and an agent with the members under it. For elastic runs see `elastic`."""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Callable

from paceline.core import lost, trained
from paceline.core.settings import Settings
from paceline.launch import record, seats, servers
from paceline.launch.elastic import ElasticJob
from paceline.launch.finishing import made_good, with_last_words
from paceline.launch.plan import plan, told
from paceline.launch.recorded import RecordedJob
from paceline.launch.replacing import Beginning, Replacements
from paceline.launch.resuming import Resuming
from paceline.launch.spec import JobSpec
from paceline.membership.agent import Agent, Outcome
from paceline.membership.process import Show
from paceline.membership.rendezvous import Rendezvous
from paceline.membership.stopped import Stopped


class Local:
    """The launcher for one host."""

    def __init__(
        self,
        show: Show,
        *,
        notice_s: float = 3.0,
        grace_s: float = 5.0,
        on_lost: Callable[[int, str], None] = lambda rank, how: None,  # of members without which the others go on
        say: Callable[[str], None] = lambda text: None,  # what happens to an elastic run, or to a server
    ) -> None:
        self._say = say
        self._show = show
        self._on_lost = on_lost
        self._notice_s = notice_s
        self._grace_s = grace_s

    def start(self, spec: JobSpec) -> LocalJob | ElasticJob:
        if spec.elastic:
            return ElasticJob(
                spec, spec.elastic, self._show, notice_s=self._notice_s, grace_s=self._grace_s, say=self._say
            )
        return LocalJob(spec, self._show, self._notice_s, self._grace_s, self._on_lost, self._say)


class LocalJob(RecordedJob):
    """A run on this host. Its members end when this process does, however it ends.

    Where a server process is lost, all members are started again and go on from the last checkpoint (`resuming`); a
    lost worker is started again by itself, if so wished (`replacing`).
    """

    def __init__(
        self,
        spec: JobSpec,
        show: Show,
        notice_s: float,
        grace_s: float,
        on_lost: Callable[[int, str], None] = lambda rank, how: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._spec, self._show, self._notice_s, self._grace_s = spec, show, notice_s, grace_s
        self._on_lost = on_lost
        self._say = say
        self._losses: list[lost.Lost] = []
        self._stopped_by = 0
        self.token = secrets.token_hex(32)
        plan(spec, "", self.token)  # a script that cannot be started leaves no directory behind
        away = spec.away
        self._where = (away.listen, away.port) if away else ("127.0.0.1", 0)
        size = spec.size
        self._record = record.Record(spec.settings, spec.script, size)
        self.settings: Settings = told(spec, self._record)
        self._resuming = Resuming(self.dir, spec.num_members)
        self._size = size
        self._begin()
        self._pids: list[int] = []
        self._start()

    @property
    def pids(self) -> list[int]:
        """The members' process numbers, by rank; empty until all are started."""
        return self._pids

    @property
    def met(self) -> bool:
        """Whether the members have come to the rendezvous: a script that never joins is as many plain scripts."""
        return bool(self._rendezvous.arrived())

    @property
    def reason(self) -> str:
        """Why the run could not go on; "": it could, or what failed says so itself."""
        return self._again.reason if self._again else ""

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._stopped_by = self._stopped_by or number
        self._agent.stop(number)

    def kill(self, rank: int, number: int) -> None:
        """Send a signal to one member and what it started."""
        self._agent.kill(rank, number)

    def resize(self) -> None:
        self._agent.resize()

    def _work(self) -> Outcome:
        outcome = self._agent.run()
        while not self._stopped_by and (line := self._resuming.after(outcome)):
            self._say(line)
            self._rendezvous.close()
            self.settings = self.settings.with_(fresh=False).pin("fresh")  # or there were nothing to resume
            self._begin()
            if self._stopped_by:  # while the agent was another one
                self._agent.stop(self._stopped_by)
            outcome = self._agent.run()
        return self._made_good(with_last_words(outcome, self.dir))

    def _close(self) -> None:
        self._rendezvous.close()
        if self._spec.away:
            self._spec.away.on_end()

    def _made_good(self, outcome: Outcome) -> Outcome:
        """With servers: who was killed over the report takes nothing from it, if nobody was ended for that."""
        cut_off = outcome.first_failed and any(ended.asked for ended in outcome.ended)
        if not self._spec.num_servers or outcome.stopped_by or cut_off:
            return outcome
        return made_good(outcome, self.dir, self._began, 0.0, self._say)

    def _begin(self) -> None:
        """Make ready to start all members."""
        self._began = time.time()
        lost.write(self.dir, ())
        trained.clear(self.dir)
        self._losses.clear()
        replacing, workers = self._spec.replacing, self._spec.num_members
        self._again = Replacements(replacing, self.dir, workers, self._say) if replacing else None
        self._beginning = Beginning(self.dir, workers)
        losable = range(0 if replacing else 1, workers) if self._spec.forgives or replacing else ()
        host, port = self._where
        self._rendezvous = Rendezvous(
            self._size, self.settings, self.token, host, port=port, replaces=replacing is not None
        )
        starts = seats.starts if self._spec.away else plan
        self._agent = Agent(
            starts(self._spec, self._rendezvous.address, self.token),
            self._show,
            logs=self.dir / "logs",
            notice_s=self._notice_s,
            grace_s=self._grace_s,
            losable=losable,
            serving=range(workers, self._size),
            again=self._again,
            stopped=[
                Stopped(self._spec.silence_s, self._goes_on, ranks=losable),
                Stopped(self._spec.silence_s, self._resuming.possible, ranks=range(workers, self._size)),
            ],
            on_started=self._started,
            on_ended=self._ended,
            on_lost=self._lost,
        )

    def _started(self, pids: list[int]) -> None:
        self._pids = pids
        with contextlib.suppress(OSError) if self._again else contextlib.nullcontext():  # it may run for long by then
            self._record.started(pids)

    def _ended(self, rank: int, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._rendezvous.gone(rank, how)

    def _goes_on(self) -> bool:
        """Whether the others can go on without a worker now."""
        return self._beginning.over and self._forgives

    @property
    def _forgives(self) -> bool:
        gate = "" if self._again else servers.turned(self.dir / "events" / "rank-0.jsonl", self._record.run.started)
        return not gate or servers.forgives(gate, 1)

    def _lost(self, rank: int, how: str) -> None:
        if not self._forgives:
            return  # the others fail of it, and the end says so
        again = self._again is not None and self._again.replaces(rank)
        self._losses.append(lost.Lost(rank=rank, how=how, at=time.time(), again=again))
        with contextlib.suppress(OSError):  # a full disk must not stop the others
            lost.write(self.dir, self._losses)
        if not self._again:  # who tells more of it
            self._on_lost(rank, how)
