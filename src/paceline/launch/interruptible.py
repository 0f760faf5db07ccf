"""Where nothing has been started yet, a signal ends the launcher at once.

`paceline run` takes signals down, to pass them on to members. Before there are any, while hosts are asked, nobody would
look at what it has taken down: for up to a minute, if a host does not answer. It ends by an exception, so that what is
asking (ssh, kubectl) ends too, and what was left on hosts is taken away.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt within, SIGTERM and SIGHUP SystemExit; those that are ignored stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in kept.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _leave)
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)


def _leave(number: int, frame: types.FrameType | None) -> None:
    raise SystemExit(128 + number)
