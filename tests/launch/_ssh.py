"""Runs over ssh servers of our own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from paceline.testing.sshd import Sshd
from tests.launch._scripts import LIMIT_S, SOURCES

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
HELLO = "import paceline\nrun = paceline.join()\nprint('hello', run.rank, run.size)\n"


class Place:
    """A folder to start runs from, with the way to some hosts."""

    def __init__(self, folder: Path, servers: Sshd) -> None:
        self.folder, self.servers = folder, servers
        folder.mkdir(exist_ok=True)
        self.script(HELLO)

    def script(self, text: str) -> None:
        (self.folder / "train.py").write_text(text)

    @property
    def _env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": SOURCES}  # that of the tests is a test's, too

    def words(self, *options: str) -> list[str]:
        return ["run", "--on", "ssh", "--ssh", self.servers.ssh, "--env", "PYTHONPATH", "--name", "it", *options]

    def paceline(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paceline", *words]
        given = {**self._env, **(env or {})}
        return subprocess.run(
            command,
            cwd=self.folder,
            env=given,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )

    def run(self, *options: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return self.paceline(*self.words(*options), "train.py", env=env)

    def refused(self, *options: str, env: Mapping[str, str] | None = None) -> str:
        """The one error of a run that was not started."""
        done = self.run(*options, env=env)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.count("paceline: error:") == 1
        assert "Traceback" not in done.stderr
        assert not (self.folder / "runs").exists()
        return done.stderr

    def begin(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "paceline", *self.words(*options), "train.py"]
        with (self.folder / "out").open("w") as out:
            return subprocess.Popen(
                command, cwd=self.folder, env=self._env, stdout=out, stderr=out, text=True, stdin=subprocess.DEVNULL
            )

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""

    @property
    def logs(self) -> str:
        return self.paceline("logs", "it").stdout


def until(fact: Callable[[], bool], said: Callable[[], str] = lambda: "", limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


def accuracy(output: str) -> float:
    found = re.search(r"test accuracy: ([\d.]+)%", output)
    assert found, output
    return float(found[1])


def servers_of(folder: Path, names: Sequence[str] = ("a", "b"), **more: Mapping[str, str]) -> Sshd:
    if reason := Sshd.missing():
        pytest.skip(reason)
    return Sshd(folder / "ssh", names, **more)  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with servers_of(tmp_path) as servers:
        yield Place(tmp_path / "work", servers)
