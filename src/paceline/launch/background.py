"""A job's work on a thread of its own: asked for, waited for, and with its error raised where it is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.membership.agent import Outcome

_LOOK_S = 0.2


class Background:
    """Begins at once. A daemon: when this process ends, the members end with the thread that started them."""

    def __init__(self, work: Callable[[], Outcome]) -> None:
        self._work = work
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        # Not `Thread.join`: interrupted by Ctrl-C, it takes the thread to have ended (Python 3.11 and 3.12).
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-agent", daemon=True)
        self._thread.start()

    def poll(self) -> Outcome | None:
        """How it ended; None while it has not."""
        if not self._over.is_set():
            return None
        if self._error is not None:
            raise self._error
        return self._outcome

    def wait(self, limit_s: float) -> Outcome | None:
        """As `poll`, after waiting up to `limit_s` for the end."""
        deadline = time.monotonic() + limit_s
        while not self._over.is_set() and (left := deadline - time.monotonic()) > 0:
            # In pieces, so that a signal's handler runs soon on the main thread.
            self._over.wait(min(left, _LOOK_S))
        return self.poll()

    def _run(self) -> None:
        try:
            self._outcome = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()
