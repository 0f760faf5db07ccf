"""A run that is served and taught at once, over HTTP; and what is said when it dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _browser import PROGRAM, WHY, browser
from _serving import Served, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NET = """
import torch
from torch import nn
from torch.nn import functional as F

def make():
    return nn.Linear(2, 2)

def example_inputs():
    return torch.zeros(1, 2)

def main():
    import paceline
    run = paceline.join()
    model = make()
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    loader = run.loader(run.uploads(like=(torch.zeros(2), 0)), batch_size=4)
    for _ in run.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

if __name__ == "__main__":
    main()
"""
KIND = {"Content-Type": "application/json"}


def learn(server: Served, inputs: Any, labels: Any) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"inputs": inputs, "labels": labels}).encode()
    code, _, said = server.ask("POST", "/learn", body, KIND)
    return code, json.loads(said)


def status(server: Served) -> dict[str, Any]:
    code, _, body = server.ask("GET", "/status")
    assert code == 200, body
    told: dict[str, Any] = json.loads(body)
    return told


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """In a group of its own, so that it can be killed as a whole."""
    (tmp_path / "net.py").write_text(NET)
    options = ["-n", "2", "--strategy", "async", "--name", "taught", "--progress", "off", "--wait-limit-s", "500"]
    command = [sys.executable, "-m", "paceline", "run", *options, "net.py"]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    try:
        until(lambda: (tmp_path / "runs/taught/desk.json").exists() or process.poll() is not None, "the run")
        yield process
    finally:
        kill(process, tmp_path)


def kill(process: subprocess.Popen[bytes], directory: Path) -> None:
    """The run, with its members, which are in sessions of their own."""
    process.kill()
    for number in sorted(_members(directory)):  # who watches others is older, and must not tell of their end
        os.kill(number, signal.SIGKILL)
    process.wait(60)


def _members(directory: Path) -> list[int]:
    """Processes that work in this directory and are none of the server's."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            if (entry / "cwd").resolve() == directory and b"paceline" in words and b"serve" not in words.split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return [number for number in found if b"paceline.serve" not in Path(f"/proc/{number}/cmdline").read_bytes()]


def test_labels_teach_the_model_that_answers_and_a_dead_run_is_told(
    tmp_path: Path, run: subprocess.Popen[bytes]
) -> None:
    with Served(tmp_path, "--replicas", "1", what="taught") as server:
        server.wait()
        until(lambda: status(server)["standing"]["current"], "a version")
        inputs, labels = [[1.0, 0.0], [0.0, 1.0]] * 8, [1, 0] * 8  # the class is not that of the larger number

        def right() -> bool:
            code, told = learn(server, inputs, labels)
            assert code in (202, 429), told
            _, answer = server.predict(inputs[:2])
            return [row[1] > row[0] for row in answer["outputs"]] == [True, False] and answer["version"] > 3

        until(right, "a model that has learned")
        code, told = learn(server, [[1.0, 0.0]], [2])
        assert (code, told["error"]) == (422, "labels: there is no class 2, the model has 2")
        until(lambda: server.metric("learn_samples_total", 'outcome="uploaded"') >= 16, "metrics")
        told = status(server)
        assert not told["standing"]["lost"]
        assert told["learning"]["words"] == ""

        kill(run, tmp_path)
        until(lambda: "serving goes on" in status(server)["standing"]["source"], "the end of the run")
        version = status(server)["standing"]["current"]
        words = status(server)["standing"]["source"]
        assert re.match(r"run taught is (gone since|over \()", words)
        assert words.endswith(f"serving goes on with version {version}")
        code, answer = server.predict(inputs[:2])
        assert (code, answer["version"]) == (200, version)
        until(lambda: learn(server, inputs, labels)[0] == 503, "/learn that says so")
        assert "taught" in status(server)["learning"]["words"]
        if not PROGRAM:
            pytest.skip(f"the rest is on the page: {WHY}")
        with browser() as tab:
            tab.go(f"http://127.0.0.1:{server.port}/")
            tab.until(f"document.querySelector('#health').innerText.includes('goes on with version {version}')")
            assert tab.value("document.querySelector('#health').matches('.ill')") == status(server)["standing"]["lost"]
            assert tab.text("#version") == f"version {version}"
            tab.until("document.querySelector('#learned').matches('.ill')")
            assert "samples given to the run" in tab.text("#learned")
            if folder := os.environ.get("PICTURES"):
                tab.size(1200, 900)
                tab.picture(Path(folder) / "dead.png")
            assert not tab.faults
