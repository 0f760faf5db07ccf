"""An agent's line to the scheduler, and what the command line asks of it.

The agent of a host says which processes began and ended, and that it lives; it is told whom to start and to stop.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from collections.abc import Iterable

import msgspec

from paceline.core.errors import ConfigError
from paceline.membership.messages import Refused
from paceline.membership.orders import (
    Beat,
    Done,
    DrainHost,
    Ended,
    EndRun,
    Fetch,
    FromAgent,
    FromTool,
    Halt,
    Host,
    Look,
    Over,
    Picture,
    Scale,
    Start,
    Started,
    Stop,
    ToAgent,
    ToTool,
    Work,
    decode,
    encode,
)
from paceline.membership.tie import Final, Tie
from paceline.transport.channel import Channel, connect

_BEAT_S = 0.5
_ANSWER_LIMIT_S = 10.0
_Said = Started | Ended


class AgentLine:
    """Holds the line, and beats on it.

    `orders` has what the scheduler wants, in order; an order of an older scheduler is not in it. An agent ignores a
    Start of what it runs. When the scheduler refuses this host, `orders` gets an Over that says why.
    """

    def __init__(self, address: str, token: str, host: Host, limit_s: float) -> None:
        self.orders: queue.Queue[Start | Stop | Over] = queue.Queue()
        self._host = host if host.agent else msgspec.structs.replace(host, agent=secrets.token_hex(8))
        self._lock = threading.Lock()
        self._term = 0
        self._running = set(host.running)  # ordered or started, and not known to the scheduler as ended
        self._owed: list[_Said] = []
        self._said: dict[int, Ended] = {}  # by id; a scheduler that is killed may not have read it
        self._wishes: list[DrainHost | EndRun] = []  # told to each scheduler: the one before may not have heard them
        self._paused: tuple[int, ...] = ()
        self._closed = threading.Event()
        try:
            self._tie = Tie(address, token, self._greet, self._heard, limit_s)
        except Final:
            order = self.orders.get_nowait()
            raise ConfigError(order.reason if isinstance(order, Over) else "refused") from None
        self._beating = threading.Thread(target=self._beat, name="paceline-beat", daemon=True)
        self._beating.start()

    def started(self, id: int, pid: int) -> None:
        """A member's process runs."""
        with self._lock:
            self._running.add(id)
            self._said.pop(id, None)
            self._say(Started(id, pid))

    def ended(self, id: int, code: int, error: str = "") -> None:
        """A member's process has ended, or could not be started; `error` as in `Ended`."""
        with self._lock:
            self._say(Ended(id, code, error))

    def beat(self, paused: Iterable[int]) -> None:
        """These processes are stopped, from now on; it is said at once, and with each beat."""
        self._paused = tuple(sorted(paused))
        self._tie.send(encode(Beat(self._paused)))

    def drain_host(self) -> None:
        """This host must go."""
        self._wish(DrainHost())

    def end_run(self, *, drain: bool) -> None:
        """The run must end, on all hosts."""
        self._wish(EndRun(drain))

    def report(self, message: FromAgent) -> None:
        """Say what a crew has to say."""
        match message:
            case Started():
                self.started(message.id, message.pid)
            case Ended():
                self.ended(message.id, message.code, message.error)
            case Beat():
                self.beat(message.paused)
            case DrainHost():
                self.drain_host()
            case EndRun():
                self.end_run(drain=message.drain)

    @property
    def down_s(self) -> float:
        """For how long the scheduler has not been reached."""
        return self._tie.down_s

    def close(self) -> None:
        self._closed.set()
        self._tie.close()
        self._beating.join()

    def __enter__(self) -> AgentLine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wish(self, message: DrainHost | EndRun) -> None:
        self._wishes.append(message)  # first: a connection that is made meanwhile begins with it
        self._tie.send(encode(message))

    def _say(self, message: _Said) -> None:
        """Now, or after what is owed once the line is there again."""
        if isinstance(message, Ended):
            self._said[message.id] = message  # first: a connection that is made meanwhile begins with it
        if self._owed or not self._tie.send(encode(message)):
            self._owed.append(message)
            self._said.pop(message.id, None)
        elif isinstance(message, Ended):
            self._running.discard(message.id)

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            self._tie.send(encode(Beat(self._paused)))
            with self._lock:
                if self._owed and self._tie.up:
                    owed, self._owed = self._owed, []
                    for message in owed:
                        self._say(message)

    def _greet(self, channel: Channel) -> None:
        said = tuple(self._said.copy().values())
        running = tuple(sorted(self._running.copy() - {e.id for e in said}))
        channel.send(encode(msgspec.structs.replace(self._host, running=running, ended=said)))
        for wish in self._wishes:
            channel.send(encode(wish))

    def _heard(self, data: bytearray) -> None:
        order: ToAgent = decode(data, ToAgent)
        if isinstance(order, Refused):
            self.orders.put(Over(self._term, order.message))
            raise Final
        if order.term < self._term:
            return
        self._term = order.term
        if isinstance(order, Start):
            with self._lock:
                self._running.add(order.id)
                self._said.pop(order.id, None)
        self.orders.put(order)


def look(address: str, token: str, limit_s: float = _ANSWER_LIMIT_S) -> Picture:
    """The run as its scheduler sees it."""
    answer = _ask(address, token, Look(), limit_s)
    if not isinstance(answer, Picture):
        raise ConfigError(f"unexpected answer from the scheduler: {type(answer).__name__}")
    return answer


def scale(address: str, token: str, size: int, limit_s: float = _ANSWER_LIMIT_S) -> str:
    """Let there be so many members; what will be done about it."""
    answer = _ask(address, token, Scale(size=size), limit_s)
    if not isinstance(answer, Done):
        raise ConfigError(f"unexpected answer from the scheduler: {type(answer).__name__}")
    return answer.text


def halt(address: str, token: str, *, drain: bool = True, limit_s: float = _ANSWER_LIMIT_S) -> str:
    """Let the run end, at once or (`drain`) when all members have left; what will be done about it."""
    answer = _ask(address, token, Halt(drain=drain), limit_s)
    if not isinstance(answer, Done):
        raise ConfigError(f"unexpected answer from the scheduler: {type(answer).__name__}")
    return answer.text


def fetch(address: str, token: str, limit_s: float = _ANSWER_LIMIT_S) -> Work:
    """What members of the run are made of."""
    answer = _ask(address, token, Fetch(), limit_s)
    if not isinstance(answer, Work):
        raise ConfigError(f"unexpected answer from the scheduler: {type(answer).__name__}")
    return answer


def _ask(address: str, token: str, wish: FromTool, limit_s: float) -> ToTool:
    with contextlib.closing(connect(address, token, limit_s)) as channel:
        channel.send(encode(wish))
        answer: ToTool = decode(channel.recv(limit_s), ToTool)
    if isinstance(answer, Refused):
        raise answer.error()
    return answer
