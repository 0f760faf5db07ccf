"""A run whose members another program starts, mpirun or torchrun: its one process is watched here, and what it passes
on is told apart by rank."""

from __future__ import annotations

import secrets
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from paceline.core.settings import Settings
from paceline.launch import record
from paceline.launch.engines import Shown
from paceline.launch.finishing import with_last_words
from paceline.launch.plan import told
from paceline.launch.recorded import RecordedJob
from paceline.launch.spec import JobSpec
from paceline.membership.agent import Agent, Outcome
from paceline.membership.process import TAIL, Start
from paceline.membership.rendezvous import Rendezvous


class Failed(NamedTuple):
    """Who failed, as the starter says."""

    rank: int = 0
    code: int = 0  # a signal is negative; 0: the starter's own


class Part(NamedTuple):
    """A piece of a rank's line."""

    rank: int
    stream: str
    text: str


class Dialect(Protocol):
    """How a starter writes."""

    failed: Failed  # by what was read so far

    def parts(self, stream: str, text: str) -> tuple[str, Sequence[Part]]:
        """Of a line: what is the starter's own, and the ranks' parts, of which the line's end ends the last."""

    def own(self, text: str) -> str:
        """What to say of a line that is the starter's own; "": nothing."""


@dataclass(frozen=True, kw_only=True)
class Starter:
    """What is started."""

    command: Callable[[Path], Sequence[str]]  # given the run's directory
    environment: Callable[[str, str], Mapping[str, str]]  # given the rendezvous' address and the token
    dialect: Dialect
    host: str = "127.0.0.1"  # where the rendezvous listens
    port: int = 0
    token: str = ""  # that others were told of; "": one is made
    close: Callable[[Path], None] = lambda directory: None


class StarterJob(RecordedJob):
    """Its members end when this process does, however it ends."""

    def __init__(self, spec: JobSpec, starter: Starter, shown: Shown) -> None:
        self._spec = spec
        self._starter = starter
        self.token = starter.token or secrets.token_hex(32)
        self._record = record.Record(spec.settings, spec.script, spec.size)
        self.settings: Settings = told(spec, self._record)
        self._output = Output(self.dir / "logs", spec.size, shown, starter.dialect)
        self._rendezvous = Rendezvous(spec.size, self.settings, self.token, starter.host, port=starter.port)
        env = starter.environment(self._rendezvous.address, self.token)
        start = Start(rank=0, command=tuple(starter.command(self.dir)), env=env, cwd=spec.cwd)
        self._agent = Agent([start], self._output, notice_s=0.0)
        self._start()

    @property
    def met(self) -> bool:
        return bool(self._rendezvous.arrived())

    @property
    def reason(self) -> str:
        """What failed says so itself."""
        return ""

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._agent.stop(number)

    def resize(self) -> None:
        """Nobody draws: the starter's ranks have no terminal."""

    def _work(self) -> Outcome:
        return with_last_words(self._told_apart(self._agent.run()), self.dir)

    def _close(self) -> None:
        self._rendezvous.close()
        self._output.close()
        self._starter.close(self.dir)

    def _told_apart(self, outcome: Outcome) -> Outcome:
        """The starter's end as that of the rank which it says has failed."""
        rank, own = self._starter.dialect.failed
        ended = outcome.ended[0]
        if not ended.code:
            return outcome
        code = own if own and not ended.asked else ended.code
        return replace(
            outcome, ended=(replace(ended, rank=rank, code=code, tail=tuple(self._output.tails[rank]), pid=0),)
        )


class Output:
    """What the starter passes on, to each rank's log and to whoever shows it; its own words are said."""

    def __init__(self, logs: Path, size: int, shown: Shown, dialect: Dialect) -> None:
        logs.mkdir(exist_ok=True)
        self._files: list[BinaryIO] = [(logs / f"rank-{rank}.log").open("ab", buffering=0) for rank in range(size)]
        self._shown = shown
        self._dialect = dialect
        self._parts: dict[tuple[int, str], str] = {}  # lines that are not whole yet
        self.tails: list[deque[str]] = [deque(maxlen=TAIL) for _ in range(size)]

    def line(self, rank: int, stream: str, text: str) -> None:
        """A line of the starter's: a tag stands before each part of a rank's line, and parts of others may be
        between."""
        own, parts = self._dialect.parts(stream, text)
        if own and (said := self._dialect.own(own)):
            self._shown.say(said)
        for i, part in enumerate(parts):
            source = (part.rank, part.stream)
            self._parts[source] = self._parts.get(source, "") + part.text
            if i == len(parts) - 1:  # and so ended by the end of the line
                self._whole(*source)

    def _whole(self, rank: int, stream: str) -> None:
        text = self._parts.pop((rank, stream))
        with suppress(OSError):  # a full disk must not stop the training
            self._files[rank].write(text.encode() + b"\n")
        self.tails[rank].append(text)
        self._shown.show.line(rank, stream, text)

    def raw(self, data: bytes) -> None:
        raise AssertionError("no rank was given a terminal")

    def close(self) -> None:
        for source in list(self._parts):
            self._whole(*source)
        for file in self._files:
            file.close()
