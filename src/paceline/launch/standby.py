"""A warm standby: a process that has imported what members need, and becomes one when it is told to.

Importing torch takes a second or two, and longer on a host whose cores are busy; a replacement from a standby has that
behind it. The agent starts this as `python -c`, writes one line of JSON to its standard input, and what follows is as
if the script had been started by itself: its arguments, `__main__`, working directory, `sys.path[0]`, an empty
standard input, and a traceback that begins in the script.

One difference stays: what a script puts into the environment before it imports torch comes too late, if torch reads
it on import. `--standbys 0` starts every member cold.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from types import TracebackType
from zipfile import is_zipfile

import msgspec

# Not `-m`, which puts the working directory before the installed packages, and not the file, which would put the files
# beside this one there.
_PROGRAM = """\
import sys
sys.flags.safe_path or sys.path.pop(0)
from paceline.launch.standby import main
main()
"""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a standby is to become."""

    script: str  # a file, or a module's name
    args: tuple[str, ...] = ()
    module: bool = False
    env: Mapping[str, str]  # besides what it was started with


def command(python: str) -> tuple[str, ...]:
    """What starts a standby."""
    return (python, "-c", _PROGRAM)


def encode(order: Order) -> bytes:
    return msgspec.json.encode(order) + b"\n"


def main() -> None:
    """Import, wait, become; ends without a word when nobody needs it."""
    with contextlib.suppress(ImportError):  # a script may do without torch, and then a standby does too
        import paceline.train.join  # noqa: F401
    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = msgspec.json.decode(line, type=Order)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.update(order.env)
    _become(order)


def _become(order: Order) -> None:
    sys.argv = [order.script, *order.args]
    try:
        if order.module:
            _first_in_path(os.getcwd())
            runpy.run_module(order.script, run_name="__main__", alter_sys=True)
        elif not os.path.isfile(order.script) or order.script.endswith((".pyc", ".pyz")) or is_zipfile(order.script):
            runpy.run_path(order.script, run_name="__main__")  # which also puts it into sys.path
        else:
            _first_in_path(os.path.dirname(os.path.realpath(order.script)))
            _run(os.path.abspath(order.script))
    except Exception as error:
        error.__traceback__ = _own(error.__traceback__)  # which Python's own hook prints, whatever it is given
        sys.excepthook(type(error), error, error.__traceback__)  # by which a run knows that its script failed
        sys.exit(1)


def _first_in_path(directory: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, directory)


def _run(path: str) -> None:
    """Run a file in the module `__main__`, as Python does; runpy would make another one, and change sys.argv[0]."""
    loader = SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__")]:
        delattr(main, name)  # of our own few lines
    vars(main).update(__file__=path, __loader__=loader, __cached__=None)
    exec(code, vars(main))


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the script; all of it where it never got there."""
    whole = trace
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace or whole
