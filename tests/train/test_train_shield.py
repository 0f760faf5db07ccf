"""A member that leaves SIGTERM to its agent: once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from paceline.environment.paceline import TOGETHER

SCRIPT = """
import os, signal, sys, time
from paceline.train import shield
shield._ONCE_S = 0.2
if "own" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
shield.leave_to_agent()
for pause in (0.0, 0.0, 0.5):
    time.sleep(pause)
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on", flush=True)
time.sleep(10)
"""


@pytest.mark.parametrize(
    ("together", "words", "code", "times"),
    [("1", (), -signal.SIGTERM, 2), ("", (), -signal.SIGTERM, 0), ("1", ("own",), 7, 0)],
)
def test_the_first_signal_is_left_to_the_agent(together: str, words: tuple[str, ...], code: int, times: int) -> None:
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, env=os.environ | {TOGETHER: together}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("goes on")) == (code, times), done.stderr
