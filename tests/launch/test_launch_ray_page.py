"""Every command of docs/how-to/ray.md that is not marked, run as it stands there, on a cluster of two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch._ray import Place, nodes, place, without_ray
from tests.launch._scripts import LIMIT_S, LONG, SOURCES

__all__ = ["nodes", "place"]
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ray.md"
HELLO = "print('hello', run.rank, run.size)"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line and "# not run" not in line]


def test_the_page_has_commands() -> None:
    assert {"run", "status", "logs", "scale", "stop"} <= {line.split()[1] for line in commands()}
    assert all(line.startswith("paceline ") for line in commands())
    assert len(blocks("python ray")) == 1


@without_ray
@pytest.mark.slow
def test_each_command_does_what_the_page_says(place: Place, tmp_path: Path) -> None:
    body = LONG.replace("\n", "\n    ")
    place.script(f"import paceline\nrun = paceline.join()\n{HELLO}\nif run.dir.name == 'big':{body}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "paceline").write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    (tmp_path / "bin" / "paceline").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": SOURCES, "RAY_ADDRESS": place.nodes.address}
    try:
        for line in commands():
            done = subprocess.run(
                line, shell=True, cwd=place.folder, env=env, capture_output=True, text=True, timeout=LIMIT_S
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            if "--detach" in line:
                place.until(lambda: "step 10 size" in place.paceline("logs", "big").stdout)
    finally:
        if (place.folder / "runs" / "big").exists():
            place.paceline("stop", "big", "--kill")


@without_ray
@pytest.mark.slow
def test_each_row_of_a_dataset_is_seen_once_in_an_epoch(place: Place) -> None:
    text = blocks("python ray")[0]
    assert "for batch in loader:  #" in text
    text = text.replace("for batch in loader:  #", "for batch in tell(loader):  #")
    place.script(
        "def tell(loader):\n    for batch in loader:\n"
        "        print('rows', *batch['x'].tolist()[: loader.last_real], flush=True)\n        yield batch\n\n\n" + text
    )
    done = place.paceline("run", "-n", "2", "--on", "ray", "--cpus", "0.5", "--name", "it", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = sorted(int(row) for line in re.findall(r"rows ([\d ]+)", done.stdout) for row in line.split())
    assert rows == sorted([*range(64)] * 2)  # two epochs
    by_member = {line[:3] for line in done.stdout.splitlines() if "] rows" in line}
    assert len(by_member) == 2


@without_ray
@pytest.mark.slow
def test_a_dataset_without_a_core_beside_the_members_is_refused(place: Place) -> None:
    place.script(blocks("python ray")[0])
    done = place.paceline("run", "-n", "2", "--on", "ray", "--name", "it", "train.py")
    assert done.returncode != 0
    assert "no core left beside the members" in done.stdout + done.stderr
