"""Clocks that jump: `time.time()` and `time.time_ns()` of Python processes are shifted while they run.

    with Clocks() as clocks:
        with Cluster(2).start("train.py", env=clocks.env) as running:
            clocks.jump(-3600.0, member=1)

Processes with `clocks.env` in their environment load a hook when they start (sitecustomize), which adds what stands
in a small file that all of them map. Which entry is theirs says PACELINE_RANK; processes without one share the last.
`time.monotonic()` is left alone, as by a clock that somebody sets; so are `datetime.now()` and C libraries, which ask
the kernel, and Python with -I or -S.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import tempfile
from pathlib import Path

from paceline.core.errors import ConfigError

MOST = 1024  # members that can have a clock of their own
_SHIFT = struct.Struct("<d")
_VARIABLE = "PACELINE_TESTING_CLOCKS"

_HOOK = '''\
def _shift():
    import mmap, os, struct, time

    path = os.environ.get("{variable}")
    if not path:
        return
    try:
        with open(path, "r+b") as file:
            shared = mmap.mmap(file.fileno(), 0)
    except OSError:
        return
    rank = os.environ.get("PACELINE_RANK", "")
    place = 8 * (int(rank) if rank.isdecimal() and int(rank) < {most} else {most})
    shift_s, real, real_ns = memoryview(shared)[place : place + 8].cast("d"), time.time, time.time_ns
    time.time = lambda: real() + shift_s[0]
    time.time_ns = lambda: real_ns() + int(shift_s[0] * 1e9)


def _next():
    """Another hook of this name, which this one hides."""
    import os, sys

    here = os.path.dirname(os.path.abspath(__file__))
    for place in sys.path:
        path = os.path.join(place, "sitecustomize.py")
        if os.path.abspath(place or ".") != here and os.path.isfile(path):
            with open(path) as file:
                exec(compile(file.read(), path, "exec"), {{"__name__": "sitecustomize", "__file__": path}})
            return


_shift()
_next()
'''


class Clocks:
    """The clocks of processes that are started with `env`."""

    def __init__(self) -> None:
        self.dir = Path()
        self._map: mmap.mmap | None = None

    def __enter__(self) -> Clocks:
        self.dir = Path(tempfile.mkdtemp(prefix="paceline-clocks-"))
        try:
            (self.dir / "sitecustomize.py").write_text(_HOOK.format(variable=_VARIABLE, most=MOST))
            with (self.dir / "shifts").open("w+b") as file:
                file.truncate(_SHIFT.size * (MOST + 1))
                self._map = mmap.mmap(file.fileno(), 0)
        except BaseException:
            shutil.rmtree(self.dir)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)  # who has mapped the file keeps it

    @property
    def env(self) -> dict[str, str]:
        """For the processes whose clocks are to jump."""
        places = [str(self.dir), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(places), _VARIABLE: str(self.dir / "shifts")}

    def jump(self, by_s: float, member: int | None = None) -> None:
        """By so many seconds from where it is now, back where negative; None: of all, the launcher's processes too."""
        if member is not None and not 0 <= member < MOST:
            raise ConfigError(f"member={member}: 0 to {MOST - 1}")
        for place in range(MOST + 1) if member is None else [member]:
            self._set(place, self._get(place) + by_s)

    def back(self) -> None:
        """All clocks are right again."""
        for place in range(MOST + 1):
            self._set(place, 0.0)

    def _get(self, place: int) -> float:
        assert self._map is not None, "use Clocks in a with"
        return float(_SHIFT.unpack_from(self._map, _SHIFT.size * place)[0])

    def _set(self, place: int, shift_s: float) -> None:
        assert self._map is not None, "use Clocks in a with"
        _SHIFT.pack_into(self._map, _SHIFT.size * place, shift_s)
