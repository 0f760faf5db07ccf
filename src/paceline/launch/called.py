"""A member that `paceline.launch` has started: it calls the function, and leaves what came of it in the call's folder.

To everything else it is a member like any other, whose script is `START`.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from paceline.launch import parcels

# The guard is for processes that a member starts anew (spawn), which look at its script.
START = """\
import sys
if __name__ == "__main__":
    sys.path[:] = {path!r}
    from paceline.launch.called import main
    main({folder!r})
"""


class Call(NamedTuple):
    """What the members do."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


def main(folder: str) -> None:
    """Call the function as this member."""
    here, rank = Path(folder), os.environ["PACELINE_RANK"]
    try:
        for name, lines in parcels.read(here / "cells").items():  # what a traceback shows of a notebook
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        call = parcels.read(here / "call")
        result = call.fn(*call.args)
        try:
            parcels.write(here / f"result-{rank}", result, about=kind_of(result))
        except Exception as error:
            raise TypeError(
                f"what member {rank} returned, {kind_of(result)}, cannot be sent back: {error}; return plain "
                "values, arrays or tensors"
            ) from error
    except Exception as error:
        error.__traceback__ = _own(error.__traceback__)
        _tell(here / f"failure-{rank}", error)
        sys.excepthook(type(error), error, error.__traceback__)  # by which a run knows that its script failed
        sys.exit(1)


def cells() -> dict[str, list[str]]:
    """The sources that are known here and in no file: what was typed."""
    known = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: entry[2] for name, entry in known.items() if entry[1] is None and not os.path.exists(name)}


def kind_of(value: Any) -> str:
    """Its type, and those of what a tuple, a list or a dict holds, in words.

    >>> kind_of((1, [2.0, b""])), kind_of({})
    ('a tuple of int and list', 'a dict')
    """
    name = type(value).__name__
    name = f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
    held = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    kinds = list(dict.fromkeys(type(each).__name__ for each in held))
    return name + (" of " + " and ".join(kinds[:3]) if kinds else "") + (" and others" if len(kinds) > 3 else "")


def _tell(path: Path, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    try:
        parcels.write(path, error, about=text)
        parcels.read(path)  # some can be pickled, and not be made again
    except Exception:
        path.unlink(missing_ok=True)
        parcels.write(path, None, about=text)


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the function; all of it where it never got there."""
    whole = trace
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace or whole
