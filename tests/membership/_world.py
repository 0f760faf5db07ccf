"""A world in which a roster can be tried: hosts, agents and members that behave as real ones do, in simulated time.

Nothing here is a socket or a thread. Every order of the roster is checked as it comes out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.errors import ConfigError, Interrupted
from paceline.core.settings import Settings
from paceline.core.view import Member, View
from paceline.membership.messages import Refused
from paceline.membership.orders import Drain, Ended, NewView, Noted, Over, Standing, Start, Stop
from paceline.membership.roster import Roster
from paceline.membership.seats import Rules

STEP_S = 0.1


@dataclass
class Process:
    id: int
    pid: int
    host: str
    begun: float
    alive: bool = True
    paused: bool = False
    line: bool = False
    cut: bool = False  # it cannot dial
    arrived: bool = False
    view: View | None = None  # the newest it heard of
    term: int = 0
    planned: bool = False
    formed: int = 0  # number of the last view that it formed
    said_ready: int = -1
    draining: bool = False
    inbox: list = field(default_factory=list)
    slow_s: float = 0.3

    @property
    def name(self):
        return (self.id, self.pid)

    def within(self, view):
        return view is not None and any((m.id, m.pid) == self.name for m in view.members)


class World:
    """`hosts`: slots by name. `checked`: what has come out so far, for the invariants."""

    def __init__(self, hosts, **rules):
        settings = Settings(join_limit_s=20.0, wait_limit_s=30.0)
        self.rules = Rules(settings=settings, **rules)
        self.now = 0.0
        self.roster = Roster(self.rules, self.now)
        self.unread: list = []
        self.awake_at = 0.0
        self.hosts = dict(hosts)
        self.silent: set[str] = set()
        self.dead: set[str] = set()
        self.processes: list[Process] = []
        self.over: dict[str, str] = {}
        self.refusals: list[Refused] = []
        self.starts: dict[int, int] = {}
        self.codes: dict[tuple[str, int], int] = {}  # by host and id, of those that have ended there
        self.views: dict[int, View] = {}
        self.last: View | None = None
        self.state: set = set()  # processes that hold the training's state
        self.out: set = set()  # processes that were left out and have not been ready since
        self.left: set = set()
        self.lost: set = set()
        self.terms = [self.roster.term]
        for name, slots in self.hosts.items():
            self.do(lambda r, name=name, slots=slots: r.host(name, slots, (), self.now))

    # The roster and its orders

    def do(self, event):
        self.unread.append(event)
        while self.unread and self.now >= self.awake_at:
            self.unread.pop(0)(self.roster)
            self.carry_out()

    def carry_out(self):
        for to, order in self.roster.take():
            assert order.term == self.roster.term if not isinstance(order, Refused) else True
            if isinstance(order, NewView):
                self.check(order)
            if isinstance(to, str):
                if to not in self.silent and to not in self.dead:
                    self.tell_agent(to, order)
            elif process := self.sitting(to):
                process.inbox.append(order)

    def check(self, order):
        view = order.view
        if view.number in self.views:
            assert self.views[view.number] == view, "a view number was used twice"
            return
        assert view.number == max(self.views, default=0) + 1
        assert [m.rank for m in view.members] == list(range(view.size))
        assert len({m.id for m in view.members}) == view.size
        ids = [(m.id, m.pid) for m in view.members]
        if self.last:
            before = [(m.id, m.pid) for m in self.last.members]
            both = [i for i in ids if i in before]
            assert both == [i for i in before if i in ids], "survivors changed their order"
        assert not self.out & set(ids), f"{self.out & set(ids)} was left out and not ready since"
        assert not self.left & set(ids), "one that had left is in a view"
        if order.planned:
            assert self.state & set(ids) == set(ids[: len(self.state & set(ids))]), "newcomers before members"
            assert self.state & set(ids) or not ids, "a planned view without anybody who holds the state"
        else:
            assert set(ids) <= self.state or not set(ids) & (self.state - self.lost), "a newcomer in an unplanned view"
            self.out |= self.state - set(ids)
            self.state = set(ids)
            self.lost -= self.state
        self.views[view.number] = self.last = view

    def sitting(self, id):
        found = [p for p in self.processes if p.id == id and p.alive and p.line]
        return found[-1] if found else None

    def tell_agent(self, host, order):
        id = -1 if isinstance(order, Over) else order.id
        running = [p for p in self.processes if p.host == host and p.alive and p.id == id]
        match order:
            case Start() if not running:
                self.starts[order.id] = self.starts.get(order.id, 0) + 1
                self.codes.pop((host, order.id), None)
                process = Process(order.id, 1000 + len(self.processes), host, self.now)
                self.processes.append(process)
                self.do(lambda r: r.started(host, order.id, process.pid, self.now))
            case Stop():
                for process in running:
                    self.end(process, -15)
            case Over():
                self.over[host] = order.reason

    def end(self, process, code):
        if not process.alive:
            return
        process.alive = False
        self.codes[process.host, process.id] = code
        had_line, process.line = process.line, False
        if had_line:
            self.do(lambda r: r.down(process.id, self.now))
        if process.host not in self.silent and process.host not in self.dead:
            self.do(lambda r: r.ended(process.host, process.id, code, self.now))

    # Time

    def run(self, seconds):
        for _ in range(max(1, round(seconds / STEP_S))):
            self.now += STEP_S
            for name in self.hosts:
                if name not in self.silent and name not in self.dead:
                    paused = [p.id for p in self.processes if p.host == name and p.alive and p.paused]
                    self.do(lambda r, name=name, paused=paused: r.beat(name, paused, self.now))
            for process in list(self.processes):
                if process.alive and not process.paused:
                    self.behave(process)
            self.do(lambda r: r.tick(self.now))
            self.lost |= {(m.id, m.pid) for m in self.picture().members if m.state == "lost"}

    def behave(self, process):
        reachable = process.host not in self.silent and not process.cut and self.now >= self.awake_at
        if not process.line and reachable and self.now - process.begun >= process.slow_s:
            self.dial(process)
        while process.alive and process.inbox:
            self.obey(process, process.inbox.pop(0))
        if not process.alive or not process.line:
            return
        view = process.view
        if process.draining and not process.within(view):  # training leaves between steps, when it is in no view
            self.leave(process, "drained")
        elif process.within(view) and process.formed < view.number:
            others = [p for p in self.processes if p.within(view)]
            if len(others) == view.size and all(self.stands(p, view) for p in others):
                process.formed = view.number
                if view.number == max(self.views):
                    self.state = {(m.id, m.pid) for m in view.members}
                self.do(lambda r: r.formed(process.id, view.number, self.now))
        elif process.arrived and not process.within(view) and process.said_ready < (view.number if view else 0):
            self.ready(process)

    def stands(self, process, view):
        return process.alive and not process.paused and process.view and process.view.number == view.number

    def ready(self, process):
        process.said_ready = process.view.number if process.view else 0
        self.out.discard(process.name)
        self.do(lambda r: r.ready(process.id, process.said_ready, self.now))

    def dial(self, process):
        try:
            member = Member(rank=process.id, host=process.host, pid=process.pid)
            holds = process.view.number if process.within(process.view) or process.said_ready > 0 else 0
            process.line = True
            self.do(lambda r: r.arrive(process.id, member, holds, self.now))
            process.arrived = True
            if process.said_ready >= 0 and not process.within(process.view):
                process.said_ready = -1  # said again
            if process.view and process.formed == process.view.number:  # what is owed of the newest view too
                self.do(lambda r: r.formed(process.id, process.formed, self.now))
        except (Interrupted, ConfigError):
            process.line = False
            self.end(process, 1)

    def obey(self, process, order):
        match order:
            case Refused():
                self.refusals.append(order)
                self.end(process, 1)
            case NewView() if order.term >= process.term:
                process.term = order.term
                if process.view is None or order.view.number > process.view.number:
                    process.view, process.planned = order.view, order.planned
            case Drain():
                process.draining = True
            case Standing():
                process.term = order.term
            case Noted():
                pass

    def leave(self, process, reason):
        self.left.add(process.name)
        self.do(lambda r: r.leave(process.id, reason, self.now))
        self.end(process, 0)

    # Faults

    def living(self):
        return [p for p in self.processes if p.alive]

    def kill(self, process):
        self.end(process, -9)

    def hang_up(self, process):
        if process.line:
            process.line = False
            process.inbox.clear()
            self.do(lambda r: r.down(process.id, self.now))

    def silence(self, host):
        self.silent.add(host)
        for process in self.living():
            if process.host == host:
                self.hang_up(process)

    def sound(self, host):
        """The host is heard again, and its agent says what it runs."""
        self.silent.discard(host)
        if host not in self.dead:
            running = sorted({p.id for p in self.living() if p.host == host})
            ended = [Ended(id, code) for (name, id), code in self.codes.items() if name == host]
            self.do(lambda r: r.host(host, self.hosts[host], running, self.now, ended=ended))

    def lose_host(self, host):
        for process in self.living():
            if process.host == host:
                process.alive = process.line = False
                self.do(lambda r, process=process: r.down(process.id, self.now))
        self.dead.add(host)

    def sleep(self, seconds, *, ticks_first):
        """The scheduler is stopped for a while; it reads then what it was told meanwhile."""
        self.awake_at = self.now + seconds
        if ticks_first:
            self.unread.append(lambda r: r.tick(self.now))

    def restart(self, away_s, unheard=()):
        """The scheduler is killed and started again; it has not read that the `unheard` were killed."""
        parts = self.roster.dump()
        self.unread.clear()
        self.awake_at = 0.0
        for process in unheard:
            process.alive = False
            self.codes[process.host, process.id] = -9
        for process in self.processes:
            process.line = False
            process.inbox.clear()
        self.now += away_s
        self.roster = Roster.load(parts, self.rules, self.now)
        assert self.roster.term > self.terms[-1]
        self.terms.append(self.roster.term)
        for host in self.hosts:
            if host not in self.silent:
                self.sound(host)

    def picture(self):
        return self.roster.look(self.now, self.now)
