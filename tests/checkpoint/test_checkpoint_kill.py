"""Killed with SIGKILL at any moment, a writer leaves a whole checkpoint, the last it reported or the next."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from paceline.checkpoint import Checkpoints, unpack

# Imports once, then forks a saver for every line it gets; the saver reports each step when its write is done.
SAVERS = """
import os, sys
from pathlib import Path
import torch
from paceline.checkpoint import Checkpoints, pack
torch.set_num_threads(1)

def save_for_ever(directory):
    checkpoints = Checkpoints(Path(directory), keep=2)
    loaded = checkpoints.load_latest(lambda message: os.write(1, f"refused {message}\\n".encode()))
    step = loaded.step if loaded else 0
    while True:
        step += 1
        shared = checkpoints.snapshot({"w": torch.full((300_000,), step), "step": step})
        own = [pack({"rank": rank, "step": step}) for rank in range(2)]
        checkpoints.write(step, shared, own, {}).result(30)
        os.write(1, f"saved {step}\\n".encode())

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            save_for_ever(line.strip())
        finally:
            os._exit(1)
    os.write(1, f"pid {pid}\\n".encode())
    os.waitpid(pid, 0)
    os.write(1, b"gone\\n")
"""


def test_twenty_kills(tmp_path: Path) -> None:
    draw = random.Random(5)
    directory = tmp_path / "checkpoints"
    acknowledged = 0
    leftovers = 0
    command = [sys.executable, "-c", SAVERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as savers:
        assert savers.stdin is not None
        assert savers.stdout is not None
        for _ in range(20):
            savers.stdin.write(f"{directory}\n")
            pid = int(savers.stdout.readline().removeprefix("pid "))
            first = savers.stdout.readline()
            assert first.startswith("saved"), first
            acknowledged = int(first.split()[1])
            time.sleep(draw.uniform(0, 0.06))
            os.kill(pid, signal.SIGKILL)
            while (line := savers.stdout.readline()) != "gone\n":
                assert line.startswith("saved"), line
                acknowledged = int(line.split()[1])

            leftovers += sum(name.startswith(".") for name in os.listdir(directory))
            checkpoints = Checkpoints(directory)
            assert not [name for name in os.listdir(directory) if name.startswith(".")]
            heard: list[str] = []
            path = checkpoints.latest(heard.append)
            assert heard == []
            assert path is not None
            loaded = checkpoints.load(path)
            assert acknowledged <= loaded.step <= acknowledged + 1
            assert loaded.shared["step"] == loaded.step
            assert bool((loaded.shared["w"] == loaded.step).all())
            assert [unpack(part) for part in loaded.own] == [{"rank": r, "step": loaded.step} for r in range(2)]
        savers.stdin.close()
        assert savers.wait(10) == 0
    assert leftovers >= 5, "the kills did not fall into writes, so this test has shown little"
