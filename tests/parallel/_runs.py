"""Runs of scripts that cut models, and what must be true of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# At the end of a script: models and optimizers as a checkpoint has them.
SAVED = """
run._strategy.together(keep=True)  # as before a checkpoint
kept = {}
if run.is_first:
    for name, part in run._saver.parts.items():
        if name.startswith(("model", "optimizer")):
            saved = part.state_dict()
            if name.startswith("optimizer"):
                kept["names"] = saved["names"], saved["trained"], [g["params"] for g in saved["param_groups"]]
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


def saved(tmp_path: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """What SAVED has left: tensors by name, and how the optimizer's parameters are called and numbered."""
    state = torch.load(tmp_path / "state.pt")
    return state, state.pop("names")


def check_meshes(tmp_path: Path, script: str, meshes: Sequence[tuple[str, str]]) -> tuple[dict[str, torch.Tensor], Any]:
    """A checkpoint passes from mesh to mesh, bit by bit: the first trains for an epoch, the others find it done."""
    states = []
    for members, mesh in meshes:
        done = run(tmp_path, script + SAVED, "-n", members, "--mesh", mesh, "--name", "it", more=("1",))
        assert done.returncode == 0, done.stderr
        states.append(saved(tmp_path))
    first, names = states[0]
    for state, called in states[1:]:
        assert (state.keys(), called) == (first.keys(), names)
        assert all(torch.equal(value, first[name]) for name, value in state.items())
    return states[0]


def check_killed(tmp_path: Path, script: str, mesh: str) -> None:
    """A member that is killed ends the run, and leaves nothing behind."""
    killed = "        if run.rank == 1 and run.step == 2: os.kill(os.getpid(), 9)\n        optimizer.step()\n"
    assert "        optimizer.step()\n" in script
    before = set(os.listdir("/dev/shm"))
    script = "import os\n" + script.replace("        optimizer.step()\n", killed)
    done = run(tmp_path, script, "-n", "2", "--mesh", mesh, more=("1",))
    assert done.returncode == 137, done.stderr
    assert "rank 1 failed first: exit code -9 (SIGKILL)" in done.stderr
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "paceline" in name}


def check_refused(tmp_path: Path, script: str, args: Sequence[str], said: str) -> None:
    """It is refused before anything starts."""
    done = run(tmp_path, script, *args, more=("1",))
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "runs").exists()
