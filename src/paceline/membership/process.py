"""One member's process as its agent sees it: started, read from, signalled, and cleared away with all it
started.

The member leads a session and a process group of its own, so that a Ctrl-C in the terminal reaches only the
launcher and one signal reaches a member's children too. Its leader stays a zombie until the group is empty:
as long as it does, the kernel gives the group's number to nobody else, and a signal cannot hit a stranger.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from paceline.membership import tether
from paceline.membership.lines import Lines

TAIL = 15  # last lines that are kept for the end
_CHUNK = 1 << 16
_LEFTOVER_S = 1.0  # between SIGTERM and SIGKILL for what a member left behind
_DRAIN_S = 0.3  # for output that comes after the end, from a process that left the group
_REDRAW_S = 1.0  # a display that is drawn again is drawn within this time


@dataclass(frozen=True, kw_only=True)
class Start:
    """What it takes to start one member."""

    rank: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None
    terminal: bool = False  # give it a terminal, whose bytes are shown as they are
    given: bytes = b""  # goes into its standard input, which then stays open
    meant: Callable[[int], int] = lambda code: code  # by an exit code: a signal is negative
    waits: bool = False  # on its standard input, to be told who it is; until then its rank is below 0


class Show(Protocol):
    """Who gets the output of the members."""

    def line(self, rank: int, stream: str, text: str) -> None:
        """One line; `stream` is "out" or "err"."""

    def raw(self, data: bytes) -> None:
        """Bytes of the member that was given a terminal."""


class Process:
    """A started member."""

    def __init__(self, start: Start, show: Show, log: Path | None) -> None:
        self.rank = start.rank
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.code: int | None = None  # as of subprocess: negative for a signal
        self.why = ""  # this agent has ended it, where the signal alone does not say that
        self.finished = False  # ended, group empty, output read
        self.began = time.monotonic()
        self.ended = 0.0
        self._show = show
        self._meant = start.meant
        self._log_path = log
        self._log: BinaryIO | None = _opened(log) if log else None
        self._terminal = -1
        self._lock = threading.Lock()
        self._killed_group = False
        self._emptied = 0.0
        self.streams: dict[int, tuple[str, Lines]] = {}  # open descriptors, standard output first
        self._popen = self._start(start)
        self.pid = self._popen.pid
        if start.given:
            assert self._popen.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, which is noticed as any member's end is
                self._popen.stdin.write(start.given)

    def _start(self, start: Start) -> subprocess.Popen[bytes]:
        if start.terminal:
            self._terminal, slave = _open_terminal()
            out = err = slave
            self.streams[self._terminal] = ("raw", Lines(hold_s=_REDRAW_S))
            ends = [slave]
        else:
            (out_from, out), (err_from, err) = os.pipe(), os.pipe()
            self.streams |= {out_from: ("out", Lines()), err_from: ("err", Lines())}
            ends = [out, err]
        for descriptor in self.streams:
            os.set_blocking(descriptor, False)
        bound = [sys.executable, "-I", "-S", tether.__file__, "bind", str(os.getpid()), *start.command]
        try:
            return subprocess.Popen(
                bound,
                env=dict(start.env),
                cwd=start.cwd,
                stdin=subprocess.PIPE if start.waits or start.given else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            self._close()
            raise
        finally:
            for end in ends:
                os.close(end)

    def become(self, rank: int, log: Path | None, order: bytes) -> None:
        """Let one that waits be this member from now on; `order`, a line, says what it is to do."""
        assert self._popen.stdin is not None
        self.rank, self.began = rank, time.monotonic()
        self.tail.clear()
        self._log_path, self._log = log, _opened(log) if log else None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is noticed as any member's end is
            self._popen.stdin.write(order)
            self._popen.stdin.close()

    @property
    def paused(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger)."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    def pump(self, descriptor: int) -> bool:
        """Read once from a descriptor of `streams` that is ready; False at its end."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:  # a terminal whose other side is closed
            data = b""
        if not data:
            return False
        stream, lines = self.streams[descriptor]
        if stream == "raw":
            self._show.raw(data)
        else:
            self._keep(data)
        self._give(stream, lines.feed(data, time.monotonic()))
        return True

    def close(self, descriptor: int) -> None:
        """Close one of `streams`; nobody may wait for it any more."""
        stream, lines = self.streams.pop(descriptor)
        self._give(stream, lines.end())
        os.close(descriptor)

    def poll(self, closing: Callable[[int], object]) -> bool:
        """Take notice of what became of the process; True when it has just ended.

        `closing` is told of each descriptor that is about to be closed.
        """
        now = time.monotonic()
        for stream, lines in self.streams.values():
            self._give(stream, lines.settle(now))
        if self.finished:
            return False
        just_ended = False
        if self.code is None:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is None:
                return False
            just_ended = True
            self.ended = now
            exited = result.si_code == os.CLD_EXITED
            self.code = self._meant(result.si_status) if exited else -result.si_status
            for descriptor in self.streams:  # once is enough for what fits into a pipe: its last words are known now
                self.pump(descriptor)
        self._clear_away(now, closing)
        return just_ended

    def signal(self, number: int) -> None:
        """Signal the member and what it started; nothing if it is gone. May be called from any thread."""
        with self._lock:
            if self.finished:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
                if number == signal.SIGTERM:
                    os.killpg(self.pid, signal.SIGCONT)  # a stopped process would not notice

    def resize(self) -> None:
        """Give the member's terminal the size of ours."""
        if self._terminal in self.streams:
            _copy_size(self._terminal)
            self.signal(signal.SIGWINCH)

    def _clear_away(self, now: float, closing: Callable[[int], object]) -> None:
        if _others(self.pid) and not self._killed_group:
            if now - self.ended >= _LEFTOVER_S:
                self._killed_group = True
                self.signal(signal.SIGKILL)
            elif now == self.ended:
                self.signal(signal.SIGTERM)
            return
        self._emptied = self._emptied or now
        if self.streams and now - self._emptied < _DRAIN_S:
            return
        for descriptor in list(self.streams):
            closing(descriptor)
        with self._lock:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()  # at once: it has ended
            self.finished = True
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._close()

    def _close(self) -> None:
        for descriptor in list(self.streams):
            self.close(descriptor)
        if self._log is not None:
            self._log.close()
            self._log = None

    def _give(self, stream: str, lines: list[str]) -> None:
        for text in lines:
            self.tail.append(text)
            if self.rank < 0:
                continue  # it is no member yet
            if stream == "raw":
                self._keep(text.encode() + b"\n")  # not each frame of a display that is drawn again
            else:
                self._show.line(self.rank, stream, text)

    def _keep(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            while data:  # a disk that fills up takes a part, and says so only at the next write
                data = data[self._log.write(data) :]
        except OSError as error:  # a full disk must not stop the training
            self._log.close()
            self._log = None
            text = f"paceline: output is no longer kept in {self._log_path}: {error.strerror}"
            self._show.line(self.rank, "err", text)


def _opened(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab", buffering=0)


def _others(group: int) -> bool:
    """Whether anything but its leader and zombies is left in a process group."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == group:
            continue
        with contextlib.suppress(OSError):
            state, _, of = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                return True
    return False


def _open_terminal() -> tuple[int, int]:
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST  # our own terminal adds what is to be added
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    os.set_inheritable(slave, False)
    _copy_size(master)
    return master, slave


def _copy_size(terminal: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        size = fcntl.ioctl(sys.__stdout__.fileno(), termios.TIOCGWINSZ, b"\0" * 8)  # type: ignore[union-attr]
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
