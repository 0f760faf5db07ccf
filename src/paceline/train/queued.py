"""How long a thread has waited for a processor while it could have run, as the kernel counts it.

With its processor time, this tells a thread that others crowd out from one that is idle by itself. Linux only; where
the kernel does not say, nothing is known.
"""

from __future__ import annotations

UNKNOWN = -1.0


def queued_s() -> float:
    """Of the thread that asks, since it began; `UNKNOWN` where nobody says.

    >>> 0 <= queued_s() or queued_s() == UNKNOWN
    True
    """
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read(100).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return UNKNOWN
