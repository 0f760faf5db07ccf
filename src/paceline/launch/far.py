"""A member on another host, of a run whose members stay: started by what leads there, and ended with it.

    python -P -m paceline.launch.far

The first line of its standard input is an `Errand`. The end of the input, which is also that of the launcher or of the
connection, asks the member to end, and kills it some seconds later. What the member prints goes through as it is, and
so does its exit code; a signal that killed it counts as a shell counts it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec

from paceline.launch.plan import environment
from paceline.launch.seats import Errand
from paceline.launch.spec import JobSpec
from paceline.membership import tether

_GRACE_S = 5.0  # between SIGTERM and SIGKILL


def main() -> int:
    errand = msgspec.json.decode(sys.stdin.buffer.readline(), type=Errand)
    spec = JobSpec(script="", threads=errand.threads, num_members=max(1, errand.members))
    env = environment(spec) | errand.env
    bound = [sys.executable, "-I", "-S", tether.__file__, "bind", str(os.getpid()), sys.executable, *errand.command]
    child = subprocess.Popen(bound, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: threading.Thread(target=_end, args=(child,), daemon=True).start())
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    code = child.wait()
    with contextlib.suppress(ProcessLookupError):  # what it has left behind
        os.killpg(child.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _end_with_input(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1 << 12):
        pass
    _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(child, signal.SIGKILL)


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


if __name__ == "__main__":
    sys.exit(main())
