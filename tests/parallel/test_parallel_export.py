"""One file of weights from a run on any mesh, by way of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from paceline import transfer
from tests.parallel._runs import run

SCRIPT = """
import sys, paceline, torch
from paceline import ConfigError, transfer
from torch import nn
from torch.nn import functional as F

run = paceline.join(progress="off")
torch.manual_seed(0)
model = run.model(nn.Sequential(nn.Linear(6, 160), nn.ReLU(), nn.Linear(160, 80), nn.ReLU(), nn.Linear(80, 3)))
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for _ in run.epochs(1):
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    run.backward(model, x, y, loss=F.cross_entropy)
    optimizer.step()
for use in transfer.save, transfer.load:
    try:
        use(model, "mine.safetensors")
    except ConfigError as error:
        assert "this model is cut over members" in str(error), error
    else:
        raise AssertionError("a part was taken for the whole")
"""


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 160), nn.ReLU(), nn.Linear(160, 80), nn.ReLU(), nn.Linear(80, 3))


@pytest.mark.parametrize("mesh", ["stage=2", "split=2", pytest.param("shard=2", marks=pytest.mark.slow)])
def test_a_checkpoint_of_any_mesh_becomes_one_file(mesh: str, tmp_path: Path) -> None:
    done = run(tmp_path, SCRIPT, "-n", "2", "--mesh", mesh, "--name", "it")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "mine.safetensors").exists()
    whole = make()
    checkpoint = sorted((tmp_path / "runs" / "it" / "checkpoints").glob("step-*"))[-1]
    transfer.load(whole, checkpoint, strict=True, show=None)
    transfer.save(whole, tmp_path / "whole.safetensors")

    torch.manual_seed(0)
    alone = make()
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    F.cross_entropy(alone(x), y).backward()
    found = load_file(tmp_path / "whole.safetensors")
    assert found.keys() == dict(alone.named_parameters()).keys()
    for name, p in alone.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(found[name], p.detach() - 0.1 * p.grad)
