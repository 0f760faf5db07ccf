"""`paceline serve` as a process, and requests to it, for the tests of this room."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 120.0
NET = """
import os, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        if pause := float(os.environ.get("PAUSE_S", "0")):
            time.sleep(pause)
        return self.second(torch.tanh(self.first(x.flatten(1))))

def make():
    torch.manual_seed(3)
    return Net()

def example_inputs():
    return torch.zeros(2, 2, 3)

def broken():
    raise RuntimeError("not today")

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, words, weight):
        return {"mean": (self.table(words) * weight[:, None, None]).mean(1), "count": weight.to(torch.int64)}

def make_table():
    torch.manual_seed(4)
    return Table()
"""


class Served:
    """One server. `lines` is what it has printed."""

    def __init__(
        self, directory: Path, *options: str, env: dict[str, str] | None = None, what: str = "", model: str = "make"
    ) -> None:
        self.directory = directory
        net = directory / "net.py"
        if not net.exists():
            net.write_text(NET)
        what = what or str(weights(directory, model))
        words = ["serve", what, "--model", f"net.py:{model}", "--port", "0", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", *words],
            cwd=directory,
            env={**os.environ, **(env or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait(self) -> Served:
        """Until all replicas are ready."""
        until(lambda: re.search(r"answers at http://[^ ]*:(\d+)/predict", self.text) or self.process.poll() is not None)
        found = re.search(r"answers at http://[^ ]*:(\d+)/predict.*?(\d+) replica", self.text)
        assert found, self.text
        self.port = int(found[1])
        until(lambda: self.metric("replicas", 'state="ready"') == int(found[2]), "all replicas")
        return self

    token = ""

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        if self.token:
            headers = {"Authorization": f"Bearer {self.token}", **(headers or {})}
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def predict(self, inputs: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        data = json.dumps({"inputs": inputs}).encode()
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        status, _, body = self.ask("POST", "/predict", data, {"Content-Type": "application/json", **named})
        return status, json.loads(body)

    def metric(self, name: str, labels: str = "") -> float:
        status, _, body = self.ask("GET", "/metrics")
        assert status == 200, body
        wanted = f"paceline_serve_{name}" + (f"{{{labels}}}" if labels else "")
        for line in body.decode().splitlines():
            if line.startswith(wanted + " "):
                return float(line.split()[-1])
        return 0.0

    def replicas(self) -> list[int]:
        """Their process numbers."""
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # one that has just ended
                pids = task.read_text().split()
                found += [int(pid) for pid in pids if _is_replica(pid)]
        return sorted(found)

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(5)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _is_replica(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return b"paceline.serve.replica" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def weights(directory: Path, model: str = "make") -> Path:
    """A file with the weights that the function makes."""
    from safetensors.torch import save_file

    path = directory / f"{model}.safetensors"
    if not path.exists():
        save_file(made(model).state_dict(), path)
    return path


def made(model: str = "make") -> Any:
    """The same model here."""
    space: dict[str, Any] = {}
    exec(NET, space)
    return space[model]().eval()


def until(true: Callable[[], Any], what: str = "") -> None:
    """Wait for a condition."""
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, f"waited {LIMIT_S:g} s for {what or true}"
        time.sleep(0.02)
