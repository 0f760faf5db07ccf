"""The most that members of a real run hold at once is what was reckoned: pages of the kernel, each counted once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.models import GPT
from paceline import memory_plan
from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster

SIZES = {"vocabulary": 4096, "context": 128, "width": 256, "heads": 4, "layers": 4}
ROWS = 8

# Memory of this process alone, and the shared memory that it has made: others may read that, and it is there once.
PEAK = """
import ctypes, fcntl, gc, os, sys, threading, time
import torch
from torch.nn import functional as F
import paceline
sys.path.insert(0, "ROOT")
from bench.models import GPT

torch.set_num_threads(1)
run = paceline.join()

def pages():
    lines = open("/proc/self/status").read().splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    made = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            own = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if own and "memfd:paceline" in os.readlink(f"/proc/self/fd/{name}"):
                found = os.fstat(int(name))
                made[found.st_ino] = 512 * found.st_blocks
        except OSError:
            pass  # closed meanwhile
    return total + sum(made.values())

def trained(steps, batch, **sizes):
    model = run.model(GPT(**sizes))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters()), model)
    for step in range(steps):
        x = torch.randint(sizes["vocabulary"], batch)
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), x.flatten()).backward()
        optimizer.step()

trained(2, (2, 16), vocabulary=64, context=16, width=32, heads=2, layers=2)  # what is made or imported once
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before, most, ended = pages(), 0, threading.Event()

def watch():
    global most
    while not ended.wait(0.001):
        most = max(most, pages())

thread = threading.Thread(target=watch)
thread.start()
trained(4, (ROWS, 128), **SIZES)
ended.set()
thread.join()
print("PEAK", most - before)
"""


def gpt() -> nn.Module:
    return GPT(**SIZES)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc")
@pytest.mark.parametrize(
    ("strategy", "mesh"), [("allreduce", ""), ("zero(stage=1)", ""), ("zero(stage=2)", ""), ("allreduce", "shard=2")]
)
def test_the_most_at_once_is_what_was_reckoned(strategy: str, mesh: str, tmp_path: Path) -> None:
    plan = memory_plan(gpt, torch.zeros(ROWS, 128, dtype=torch.int64), members=2)
    script = tmp_path / "train.py"
    told = PEAK.replace("ROOT", str(Path(__file__).parents[2])).replace("ROWS", str(ROWS)).replace("SIZES", repr(SIZES))
    script.write_text(told)
    members = Cluster(2).run(
        script,
        settings=Settings(progress="off", checkpoint_keep=0, strategy=strategy, mesh=mesh),
        env={"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"},  # else malloc keeps what is free
        limit_s=150,
    )
    for member in members:
        assert member.code == 0, member.output
        most = int(member.output.partition("PEAK ")[2].split()[0])
        assert most == pytest.approx(plan.choice(mesh, strategy).at_once, rel=0.1)
