"""A run whose members mpirun starts: its one process is watched here, and what it passes on is told apart by rank."""

from __future__ import annotations

import re
import secrets
import signal
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

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

_TAG = re.compile(r"\[([^\[\]\s]+@)?\d+,(\d+)\]<(stdout|stderr)>:")
_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_CODE = re.compile(r"Process name: \[.*?,(\d+)\]")


class MpiJob(RecordedJob):
    """Its members end when this process does, however it ends."""

    def __init__(
        self,
        spec: JobSpec,
        command: tuple[str, ...],
        environment: Callable[[str, str], Mapping[str, str]],  # given the rendezvous' address and the token
        host: str,  # where the rendezvous listens
        shown: Shown,
    ) -> None:
        self._spec = spec
        self.token = secrets.token_hex(32)
        self._record = record.Record(spec.settings, spec.script, spec.size)
        self.settings: Settings = told(spec, self._record)
        self._output = _Output(self.dir / "logs", spec.size, shown)
        self._rendezvous = Rendezvous(spec.size, self.settings, self.token, host)
        env = environment(self._rendezvous.address, self.token)
        start = Start(rank=0, command=command, env=env, cwd=spec.cwd)
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
        """Nobody draws: mpirun's ranks have no terminal."""

    def _work(self) -> Outcome:
        return with_last_words(self._told_apart(self._agent.run()), self.dir)

    def _close(self) -> None:
        self._rendezvous.close()
        self._output.close()

    def _told_apart(self, outcome: Outcome) -> Outcome:
        """mpirun's end as that of the rank which it says has failed."""
        rank, number = self._output.failed
        ended = outcome.ended[0]
        if not ended.code:
            return outcome
        code = -number if number and not ended.asked else ended.code
        return replace(
            outcome, ended=(replace(ended, rank=rank, code=code, tail=tuple(self._output.tails[rank]), pid=0),)
        )


class _Output:
    """What mpirun passes on, to each rank's log and to whoever shows it; its own words are said."""

    def __init__(self, logs: Path, size: int, shown: Shown) -> None:
        logs.mkdir(exist_ok=True)
        self._files: list[BinaryIO] = [(logs / f"rank-{rank}.log").open("ab", buffering=0) for rank in range(size)]
        self._shown = shown
        self._parts: dict[tuple[int, str], str] = {}  # lines that are not whole yet
        self.tails: list[deque[str]] = [deque(maxlen=TAIL) for _ in range(size)]
        self.failed = (0, 0)  # the rank that mpirun names, and the signal that killed it

    def line(self, rank: int, stream: str, text: str) -> None:
        """A line of mpirun's: a tag stands before each part of a rank's line, and parts of others may be between."""
        tags = list(_TAG.finditer(text))
        if own := text[: tags[0].start()] if tags else text:
            self._own(own)
        for tag, behind in zip(tags, [*tags[1:], None]):
            part = text[tag.end() : behind.start() if behind else None]
            if tag[1]:  # as Open MPI 5 writes it
                part = part.removeprefix(" ")
            source = (int(tag[2]), "err" if tag[3] == "stderr" else "out")
            self._parts[source] = self._parts.get(source, "") + part
            if behind is None:  # and so ended by the end of the line
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

    def _own(self, text: str) -> None:
        if match := _SIGNAL.search(text):
            self.failed = (int(match[1]), int(match[2]))
        elif match := _CODE.search(text):
            self.failed = (int(match[1]), 0)
        if text.strip(" -"):
            self._shown.say(f"mpirun: {text}")
