"""The last words of a process that was told to end (`Dismissed`): a line. Where it stood then is nobody's mistake."""

from __future__ import annotations

import sys
from types import TracebackType

from paceline.core.errors import Dismissed

_print_error = sys.excepthook


def tell_in_a_line() -> None:
    """From now on, instead of a traceback; other errors are printed as before."""
    global _print_error
    if sys.excepthook is not _tell:
        _print_error, sys.excepthook = sys.excepthook, _tell


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, Dismissed):
        print(f"paceline: {error}", file=sys.stderr)
    else:
        _print_error(kind, error, trace)
