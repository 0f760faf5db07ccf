"""Every command of docs/how-to/slurm.md, run as it stands there, in a Slurm of this machine's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch._slurm import LIMIT_S, LONG, Site

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "slurm.md"
SHORT = "import paceline\nrun = paceline.join()\nprint('together', run.size)\n"


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line]


def test_the_page_has_commands() -> None:
    found = {line.split()[1] for line in commands() if line.startswith("paceline ")}
    assert {"run", "status", "logs", "scale", "stop"} <= found


@pytest.mark.slow
def test_each_command_does_what_the_page_says(site: Site, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, words in (("paceline", f"{sys.executable} -m paceline"), ("python", sys.executable)):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    site.env["PATH"] = f"{tmp_path / 'bin'}:{site.env['PATH']}"
    for line in commands():
        if "--on slurm" in line:
            site.slurm.cancel_all()  # two nodes, one run after the other
        (site.dir / "train.py").write_text(LONG if "wide" in line else SHORT)
        done = subprocess.run(
            line, shell=True, cwd=site.dir, env=site.env, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if line.startswith(("srun", "salloc")):
            assert done.stdout.count("together") == int(re.findall(r"-n 4|ntasks=2", line)[0][-1]), done.stdout
        if "--name wide" in line:
            site.until(lambda: "trains" in site.log("wide"), "the first steps")
