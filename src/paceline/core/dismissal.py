"""The last words of a process that was told to end (`Dismissed`), or that was left alone: a line.

Where it stood then is nobody's mistake.
"""

from __future__ import annotations

import sys
from types import TracebackType

from paceline.core.errors import Dismissed, Interrupted

_print_error = sys.excepthook
_needs_others = ""


def tell_in_a_line(needs_others: str = "") -> None:
    """From now on, instead of a traceback; other errors are printed as before.

    `needs_others`: who this is, where nothing follows an `Interrupted` but the end: the others are gone.
    """
    global _print_error, _needs_others
    _needs_others = needs_others
    if sys.excepthook is not _tell:
        _print_error, sys.excepthook = sys.excepthook, _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, Dismissed):
        print(f"paceline: {error}", file=sys.stderr)
    elif _needs_others and type(error) is Interrupted:
        print(f"paceline: {_needs_others} ends: {error}", file=sys.stderr)
    else:
        _print_error(kind, error, trace)
