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
        self._thread = threading.Thread(target=self._run, name="paceline-agent", daemon=True)
        self._thread.start()

    def poll(self) -> Outcome | None:
        """How it ended; None while it has not."""
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._outcome

    def wait(self, limit_s: float) -> Outcome | None:
        """As `poll`, after waiting up to `limit_s` for the end."""
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            # In pieces, so that a signal's handler runs soon on the main thread.
            self._thread.join(min(left, _LOOK_S))
        return self.poll()

    def _run(self) -> None:
        try:
            self._outcome = self._work()
        except BaseException as error:
            self._error = error
