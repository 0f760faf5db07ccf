"""A standby becomes a script: what fails there fails as it would by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline.launch import standby

SCRIPT = """
import sys

def hook(kind, error, trace):
    print("heard of", kind.__name__, trace.tb_frame.f_code.co_filename)

sys.excepthook = hook
raise ValueError("too large")
"""


def test_an_exception_goes_through_the_hook_by_which_a_run_knows_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    order = standby.encode(standby.Order(script=str(script), env={}))
    done = subprocess.run(standby.command(sys.executable), input=order, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout.decode() == f"heard of ValueError {script}\n"
