"""What is printed of the error that a process ends by."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from paceline.core import dismissal, errors
dismissal.tell_in_a_line({who!r})
raise errors.{kind}("the channel to server 0 broke")
"""


@pytest.mark.parametrize(
    ("who", "kind", "said"),
    [
        ("", "Dismissed", "paceline: the channel to server 0 broke\n"),
        ("member 1", "Dismissed", "paceline: the channel to server 0 broke\n"),
        ("member 1", "Interrupted", "paceline: member 1 ends: the channel to server 0 broke\n"),
        ("", "Interrupted", "Traceback"),
        ("member 1", "TimedOut", "Traceback"),
        ("member 1", "ConfigError", "Traceback"),
    ],
)
def test_who_was_left_alone_says_so_in_a_line(who, kind, said):
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(who=who, kind=kind)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == said if said != "Traceback" else done.stderr.startswith(said)
