"""Ties the lives of members to their agent's: when the agent is gone, however it went, so are they.

A program of its own, run as `python -I -S tether.py …` with nothing but the standard library, so that it
starts in a few milliseconds. Two ties hold a member:

    bind    becomes the member, after asking the kernel to kill it when the agent's starting thread ends; `parent` in
            place of the agent's number: whoever started it, where that is not the agent
    guard   stands beside the agent, reads which process groups live, and when the agent's end of the pipe
            closes kills what is left: what members started dies too, which the kernel does not promise

Linux only, like the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def bind(agent: int, command: list[str]) -> None:
    """Become `command`; it gets SIGKILL when `agent` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:  # it ended before we asked
        os._exit(128 + signal.SIGKILL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what is ignored would be inherited
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"paceline: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


def guard() -> None:
    """Keep the list of process groups that standard input tells (`+7`, `-7`); at its end, kill the rest."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # these are meant for the agent
    groups: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for line in sys.stdin:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "bind":
        bind(os.getppid() if sys.argv[2] == "parent" else int(sys.argv[2]), sys.argv[3:])
    else:
        guard()
