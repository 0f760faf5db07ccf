"""Runs of scripts that split models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SAVED = """
run._strategy.together(keep=True)  # as before a checkpoint
kept = {}
if run.is_first:
    for name, part in run._saver.parts.items():
        if name.startswith(("model", "optimizer")):
            saved = part.state_dict()
            if name.startswith("optimizer"):
                saved = {f"{i}.{k}": v for i, own in saved["state"].items() for k, v in own.items()}
            kept |= {f"{name}.{key}": value for key, value in saved.items()}
    torch.save(kept, "state.pt")
"""


def run(tmp_path: Path, script: str, *args: str, more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "paceline", "run", *args, "train.py", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, env=env, cwd=tmp_path)
