"""Agents on other hosts, started by the launcher: where a file says that there are hosts, or a program.

Each line is a host's name, its slots and its members' labels; the list is read again every few seconds. On a host that
appears an agent is started, over ssh unless another way is given; one that vanishes is drained. An agent gets where to
go, with the token, on its standard input, and drains when that ends: so it also ends when the launcher does.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from paceline.core.errors import ConfigError
from paceline.core.lost import how
from paceline.launch import listed
from paceline.launch.joined import APART
from paceline.launch.reach import Reach
from paceline.launch.spec import Elastic, Room
from paceline.membership.process import Show
from paceline.transport.address import is_loopback
from paceline.transport.wires import own_address

if TYPE_CHECKING:
    from paceline.launch.ground import Remote

_LOOK_S = 3.0  # between two readings of the list
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0  # before an agent that ended is started again
_WELL_S = 60.0  # after which it had started well
_LEAVE_S = 30.0  # for one that drains
_LAST_WORDS_S = 2.0  # to be read once an agent has ended
_MEMBER = re.compile(r"\[ *(\d+)\] (.*)", re.DOTALL)


def reachable(source: str) -> str:
    """The address of this host on the way to the first of the hosts."""
    for name in listed.some(source):
        with contextlib.suppress(ConfigError):
            address = own_address(name.rpartition("@")[2])
            if not is_loopback(address):
                return address
    raise ConfigError(f"which address of this host do those of {source} reach? give --listen ADDRESS")


def command(name: str, room: Room) -> list[str]:
    """What starts the agent of a host, there.

    >>> command("node7", Room(4, ("gpu",)))[2:]
    ['paceline', 'agent', '--join', '-', '--name', 'node7', '--slots', '4', '--label', 'gpu']
    """
    labels = (word for label in room.labels for word in ("--label", label))
    agent = ["paceline", "agent", "--join", "-", "--name", name, "--slots", str(room.slots)]
    return [sys.executable, "-m", *agent, *labels]


@dataclass
class _Post:
    """One host."""

    room: Room
    process: subprocess.Popen[bytes] | Remote | None = None
    reader: threading.Thread | None = None  # of what it prints
    began: float = 0.0
    fails: int = 0  # in a row
    again_at: float = 0.0
    leaves_by: float | None = None  # its agent was told to drain
    told: set[str] = field(default_factory=set)  # of it since it started well: each line once


class Posts:
    """Keeps an agent on each host of the list, in a thread of its own.

    Args:
        ending: whether the run is about to end, so that nothing is started any more.
    """

    def __init__(
        self,
        elastic: Elastic,
        where: Reach,
        show: Show,
        say: Callable[[str], None],
        ending: Callable[[], bool],
        logs: Path,
    ) -> None:
        self._logs = logs
        self._elastic = elastic
        self._ending = ending
        self._where = msgspec.json.encode(where) + b"\n"
        self._show = show
        self._say = say
        self._closed = threading.Event()
        self._wanted = self._list()
        self._posts: dict[str, _Post] = {}
        self._complained = ""
        self._thread = threading.Thread(target=self._run, name="paceline-posts", daemon=True)
        self._thread.start()

    @property
    def hosts(self) -> list[str]:
        """Those of the list."""
        return list(self._wanted)

    def close(self) -> None:
        """The run is over; agents that do not end by themselves drain, and are left to do so after a while."""
        self._closed.set()
        self._thread.join()
        for post in self._posts.values():
            _end_input(post)
        deadline = time.monotonic() + _LEAVE_S
        for post in self._posts.values():
            if post.process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    post.process.wait(max(0.0, deadline - time.monotonic()))
                post.process.kill()
                post.process.wait()
            if post.reader:  # the run has not ended before its last lines are kept
                post.reader.join(_LAST_WORDS_S)

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(0.1):
            if self._ending():
                continue
            now = time.monotonic()
            if now - looked_at >= _LOOK_S:
                self._look()
                looked_at = now
            for name, room in self._wanted.items():
                self._posts.setdefault(name, _Post(room))
            for name, post in list(self._posts.items()):
                self._turn(name, post, now)

    def _look(self) -> None:
        try:
            self._wanted, self._complained = self._list(), ""
        except (ConfigError, OSError) as error:  # who is there stays
            if str(error) != self._complained and not self._closed.is_set():
                self._complained = str(error)
                self._say(f"warning: {error}; the hosts that are known stay")

    def _list(self) -> dict[str, Room]:
        ground = self._elastic.ground
        return dict(ground.hosts()) if ground else listed.read(self._elastic.hosts, self._closed.is_set)

    def _turn(self, name: str, post: _Post, now: float) -> None:
        wanted = self._wanted.get(name) == post.room
        if post.process and post.process.poll() is not None:
            code, post.process = post.process.returncode or 0, None
            if wanted and post.leaves_by is None:
                self._wait(name, post, code, now)
        if post.process is None and (post.leaves_by is not None or not wanted):
            del self._posts[name]
        elif post.process is None and now >= post.again_at:
            self._start(name, post)
        elif post.process and not wanted and post.leaves_by is None:
            listed = "there" if self._elastic.ground else f"in {self._elastic.hosts}"
            self._say(f"host {name} is not {listed} as before: it is drained")
            post.leaves_by = now + _LEAVE_S
            _end_input(post)
        elif post.process and post.leaves_by is not None and now >= post.leaves_by:
            post.process.kill()

    def _wait(self, name: str, post: _Post, code: int, now: float) -> None:
        """Before the agent of a host is started again."""
        if now - post.began > _WELL_S:
            post.fails = 0
            post.told.clear()
        wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(post.fails, 5))
        post.again_at, post.fails = now + wait_s, post.fails + 1
        if code:  # else the run has finished, and we are about to hear of it
            self._tell(post, f"the agent of host {name} ended ({how(code)}); it is started again in {wait_s:g} s")

    def _tell(self, post: _Post, line: str) -> None:
        """Once: a host that is down is tried for as long as the run lasts."""
        if line not in post.told:
            post.told.add(line)
            self._say(line)

    def _start(self, name: str, post: _Post) -> None:
        if ground := self._elastic.ground:
            post.process, post.began = ground.start(name, post.room, self._where), time.monotonic()
            self._read(name, post)
            return
        words, first = self._way(name, post.room)
        pipe = subprocess.PIPE
        try:
            post.process = subprocess.Popen(
                words,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the launcher
            )
            post.began = time.monotonic()
        except OSError as error:
            post.again_at = time.monotonic() + _LONGEST_WAIT_S
            self._tell(post, f"warning: the agent of host {name} cannot be started: {words[0]}: {error.strerror}")
            return
        assert post.process.stdin
        with contextlib.suppress(OSError):  # it has ended already
            post.process.stdin.write(first + self._where)
            post.process.stdin.flush()
        self._read(name, post)

    def _read(self, name: str, post: _Post) -> None:
        post.reader = threading.Thread(target=self._pass_on, args=(name, post, post.process), daemon=True)
        post.reader.start()

    def _way(self, name: str, room: Room) -> tuple[list[str], bytes]:
        """What starts the agent of a host, and what it gets first."""
        if way := self._elastic.way:
            return way.command(name, *room), way.input(name, *room)
        words = [word.replace("{host}", name) for word in shlex.split(self._elastic.start_on)]
        return [*words, *map(shlex.quote, command(name, room))], b""

    def _pass_on(self, name: str, post: _Post, process: subprocess.Popen[bytes] | Remote) -> None:
        """What an agent prints: its members' lines as those of members, its own with the host's name.

        Where its disk is another one, its members' lines are kept here too, for `paceline logs`.
        """
        assert process.stdout
        apart = False
        kept: dict[int, BinaryIO] = {}
        with contextlib.ExitStack() as files:
            for data in process.stdout:
                text = data.decode(errors="replace").rstrip("\r\n")
                if line := _MEMBER.fullmatch(text):
                    rank = int(line[1])
                    self._show.line(rank, "out", line[2])
                    with contextlib.suppress(OSError):  # a full disk must not stop the others
                        if apart and rank not in kept:
                            self._logs.mkdir(parents=True, exist_ok=True)
                            path = self._logs / f"rank-{rank}.log"
                            kept[rank] = files.enter_context(path.open("ab", buffering=0))
                        if apart:
                            kept[rank].write(line[2].encode() + b"\n")
                elif text:
                    apart = apart or APART in text
                    self._tell(post, f"host {name}: {text.removeprefix('paceline: ')}")


def _end_input(post: _Post) -> None:
    if post.process and post.process.stdin:
        with contextlib.suppress(OSError):
            post.process.stdin.close()
