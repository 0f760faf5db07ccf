"""Where SIGTERM goes to all processes of a host at once, a member leaves it to its agent, which lets the run drain.

A batch system that takes nodes away signals whatever runs on them. A member that ended by that would take its steps
since the last checkpoint with it; so it notes the first signal and goes on, until the scheduler says that all leave.
Another one a while later is the agent's own, whose patience has ended.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import types

from paceline.environment.paceline import TOGETHER

_ONCE_S = 3.0  # within which signals are the same one: it may come from several sides


def leave_to_agent() -> None:
    """From now on, if the agent says that it is so, and the script has no handler of its own."""
    if not os.environ.get(TOGETHER) or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _Noted())


class _Noted:
    def __init__(self) -> None:
        self._at = 0.0

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        self._at = self._at or time.monotonic()
        if time.monotonic() - self._at > _ONCE_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
