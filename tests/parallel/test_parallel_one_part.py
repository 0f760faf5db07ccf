"""`--mesh shard=1`: a run of one whose model is cut into one part, as offload needs it on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster

_TRAIN = """
import torch, paceline
from torch import nn
from torch.nn import functional as F

run = paceline.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 4))
try:
    run.model(model, offload="parameters")
except paceline.ConfigError as error:
    print("REFUSED", error)
model = run.model(model)
optimizer = run.optimizer(torch.optim.AdamW(model.parameters()), model)
for step in range(4):
    torch.manual_seed(step)
    x, y = torch.randn(8, 64), torch.randint(4, (8,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
print("LOSS", loss.item(), type(next(model.parameters())).__name__)
"""


def train(tmp_path: Path, mesh: str) -> tuple[float, str, str]:
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    settings = Settings(progress="off", mesh=mesh, device="cpu", checkpoint_keep=0)
    (member,) = Cluster(1).run(script, settings=settings, limit_s=60)
    assert member.code == 0, member.output
    loss, kind = member.output.partition("LOSS ")[2].split()[:2]
    return float(loss), kind, member.output.partition("REFUSED ")[2].splitlines()[0]


def test_one_part_is_the_whole(tmp_path: Path) -> None:
    whole, kind, refused = train(tmp_path, "")
    assert kind == "Parameter"
    assert "on one member without a GPU the model is in host memory; leave it out" in refused
    part, kind, refused = train(tmp_path, "shard=1")
    assert kind == "DTensor"
    assert part == whole
    assert "on one member without a GPU the model is in host memory" in refused


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_gpu_keeps_its_part_in_host_memory(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        _TRAIN.replace("model = run.model(model)\n", "")
        .replace("    run.model(model, off", "    model = run.model(model, off")
        .replace("torch.randint(4, (8,))", "torch.randint(4, (8,)).cuda()")
        .replace("torch.randn(8, 64)", "torch.randn(8, 64).cuda()")
        .replace("type(next(model.parameters())).__name__", "next(model.parameters()).device")
    )
    settings = Settings(progress="off", mesh="shard=1", device="cuda", checkpoint_keep=0)
    (member,) = Cluster(1).run(script, settings=settings, limit_s=90)
    assert member.code == 0, member.output
    assert member.output.partition("LOSS ")[2].split()[1] == "cpu"
