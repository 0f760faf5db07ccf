"""Every command of docs/how-to/ssh.md, run as it stands there: `ssh` on the path leads to servers of our own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch._scripts import LIMIT_S, LONG, SOURCES
from tests.launch._ssh import Place, servers_of, until

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ssh.md"


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line]


def test_the_page_has_commands() -> None:
    found = {line.split()[1] for line in commands()}
    assert {"doctor", "run", "status", "logs", "scale", "stop"} <= found
    assert all(line.startswith("paceline ") for line in commands())


@pytest.mark.slow
def test_each_command_does_what_the_page_says(tmp_path: Path) -> None:
    real = shutil.which("ssh")
    carried = dict.fromkeys("ab", f"SetEnv PYTHONPATH={SOURCES}")
    with servers_of(tmp_path, more=carried) as servers:
        place = Place(tmp_path / "work", servers)
        place.script(
            LONG.replace("run.epochs(50)", "run.epochs(50 if run.dir.name == 'big' else 1)").replace("40000", "800")
        )
        (tmp_path / "bin").mkdir()
        _program(tmp_path / "bin" / "ssh", f'exec {real} -F {servers.dir / "config"} "$@"')
        _program(tmp_path / "bin" / "paceline", f'exec {sys.executable} -m paceline "$@"')
        env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": SOURCES}
        try:
            for line in commands():
                done = subprocess.run(
                    line, shell=True, cwd=place.folder, env=env, capture_output=True, text=True, timeout=LIMIT_S
                )
                assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
                if "--detach" in line:
                    until(lambda: "] step 10" in place.paceline("logs", "big").stdout)
        finally:
            if (place.folder / "runs" / "big").exists():
                place.paceline("stop", "big", "--kill")


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
