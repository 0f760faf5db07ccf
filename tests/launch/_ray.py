"""A Ray cluster of several nodes on this machine: Ray's own, for tests."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 150.0
SOURCES = str(Path(__file__).parents[2] / "src")
LONG = """
import time, torch, paceline
run = paceline.join()
model = torch.nn.Linear(2, 1)
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
data = torch.utils.data.TensorDataset(torch.ones(40000, 2), torch.ones(40000, 1))
loader = run.loader(data, batch_size=4)
for epoch in run.epochs(50):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        time.sleep(0.02)
        if step % 10 == 0:
            print("size", run.size, "step", step, flush=True)
"""
without_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray: pip install 'paceline[ray]'")


class Nodes:
    """The cluster: a head without cores, where launchers are, and nodes of one core each."""

    def __init__(self, number: int) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add() for _ in range(number)]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, cpus: int = 1) -> Any:
        return self.cluster.add_node(num_cpus=cpus, object_store_memory=80 << 20)

    def kill(self, node: Any) -> None:
        """As when its power is cut: nothing is said to anybody."""
        for process in node.all_processes["raylet"]:
            os.kill(process.process.pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes = [other for other in self.nodes if other is not node]

    def free(self) -> float:
        """Cores that nobody has."""
        import ray

        return float(ray.available_resources().get("CPU", 0.0))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    import ray

    kept = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_ADDRESS")}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    os.environ["PYTHONPATH"] = SOURCES  # of all that Ray starts
    os.environ.pop("RAY_ADDRESS", None)
    made = Nodes(2)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield made
    finally:
        ray.shutdown()
        made.cluster.shutdown()
        for name, value in kept.items():
            os.environ.pop(name, None)
            os.environ |= {name: value} if value is not None else {}
        for number, handler in handlers.items():
            signal.signal(number, handler)


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
    made.until(lambda: nodes.free() == len(nodes.nodes), 30.0)  # what a run had is given back
