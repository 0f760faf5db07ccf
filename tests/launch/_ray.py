"""A Ray cluster of several nodes on this machine: Ray's own, for tests."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.launch._scripts import LIMIT_S, SOURCES

without_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray: pip install 'paceline[ray]'")


# The cluster's nodes are processes of this one, so that none of Ray is in that of the tests.
_HOST = """
import json, os, signal, sys
import ray
from ray.cluster_utils import Cluster

said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
store = 80 << 20
head = {"num_cpus": 0, "object_store_memory": store, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = []

def add(cpus=1):
    nodes.append(cluster.add_node(num_cpus=cpus, object_store_memory=store))
    return len(nodes)

def kill():
    node = nodes.pop()
    for process in node.all_processes["raylet"]:  # as when its power is cut: nothing is said to anybody
        os.kill(process.process.pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)

def free():
    return ray.available_resources().get("CPU", 0.0)

def about():
    return {"address": cluster.address, "session": cluster.head_node.get_session_dir_path()}

add(), add()
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
for line in sys.stdin:
    name, *given = json.loads(line)
    print(json.dumps(globals()[name](*given)), file=said, flush=True)
ray.shutdown()
cluster.shutdown()
"""


class Nodes:
    """The cluster: a head without cores, where launchers are, and two nodes of one core each."""

    def __init__(self) -> None:
        env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": SOURCES}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOST],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.number = 2
        about = self._ask("about")
        self.address, self.session = str(about["address"]), Path(about["session"])

    def add(self, cpus: int = 1) -> None:
        self._ask("add", cpus)
        self.number += 1

    def kill(self) -> None:
        """The last one."""
        self._ask("kill")
        self.number -= 1

    def free(self) -> float:
        """Cores that nobody has."""
        return float(self._ask("free"))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout
        self._process.stdout.close()

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    for left in (2, 1, 0):  # Ray's own limits for its start are short for a busy machine
        try:
            made = Nodes()
            break
        except ValueError:  # it has ended, and answers nothing
            if not left:
                raise
    try:
        yield made
    finally:
        made.close()


class Place:
    """A folder to start runs from."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self.folder, self.nodes = folder, nodes

    def script(self, text: str) -> None:
        (self.folder / "train.py").write_text(text)

    @property
    def _env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": SOURCES, "RAY_ADDRESS": self.nodes.address}

    def paceline(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "paceline", *words],
            cwd=self.folder,
            env={**self._env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )

    def refused(self, *words: str) -> str:
        """The one error of a run that was not started."""
        done = self.paceline("run", "--on", "ray", *words)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.count("paceline: error:") == 1
        assert "Traceback" not in done.stderr
        assert not (self.folder / "runs").exists()
        return done.stderr

    def begin(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "paceline", "run", "--on", "ray", "--name", "it", *options, "train.py"]
        with (self.folder / "out").open("w") as out:
            return subprocess.Popen(
                command, cwd=self.folder, env=self._env, stdout=out, stderr=out, text=True, stdin=subprocess.DEVNULL
            )

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text() if (self.folder / "out").exists() else ""

    def until(self, fact: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not fact():
            assert time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.1)


@pytest.fixture
def place(tmp_path: Path, nodes: Nodes) -> Iterator[Place]:
    made = Place(tmp_path, nodes)
    yield made
    made.until(lambda: nodes.free() == nodes.number, 30.0)  # what a run had is given back
