"""Zero in real runs: processes, loaders, checkpoints on another number of members."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster

SCRIPT = """
import sys, torch, paceline
from torch import nn
from safetensors.torch import save_file
from torch.utils.data import TensorDataset

folder, epochs, kind, trains = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.manual_seed(5)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(90, 12, generator=g), torch.randn(90, 3, generator=g))
model = nn.Sequential(nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3))
run = paceline.join()
make = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}[kind]
optimizer = run.optimizer(make(model.parameters()), model)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
run.track(scheduler=scheduler, scaler=scaler)
loader = run.loader(data, batch_size=24 // run.size)
norms = []
for epoch in run.epochs(epochs):
    for i, (x, y) in enumerate(loader):
        if str(epoch) not in trains:
            continue
        optimizer.zero_grad()
        scaler.scale((model(x) - y).square().mean()).backward()
        scaler.unscale_(optimizer)
        norms.append(float(run.clip_grad_norm(optimizer if i % 2 else model, 1.0)))
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()
weights = {name: t.clone() for name, t in model.state_dict().items()} | {"norms": torch.tensor(norms)}
if run.is_first:
    save_file(weights, f"{folder}/weights.safetensors")
run.close()
"""


def trained(
    folder: Path, size: int, strategy: str, epochs: int = 2, kind: str = "adamw", trains: str = "0123"
) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    settings = Settings(name="it", root=str(folder), strategy=strategy, progress="off")
    for member in Cluster(size).run(SCRIPT, [str(folder), str(epochs), kind, trains], settings=settings):
        assert member.code == 0, member.output
    return load_file(folder / "weights.safetensors")


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a if name != "norms")


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_of_two_processes_is_that_of_one(stage: int, tmp_path: Path) -> None:
    """With a loader whose last batches are uneven, a scheduler, GradScaler and clipping."""
    one = trained(tmp_path / "one", 1, "allreduce")
    two = trained(tmp_path / "two", 2, f"zero(stage={stage}, bucket_mb=0.004)")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
    if stage == 1:
        assert alike(two, trained(tmp_path / "reduced", 2, "allreduce(bucket_mb=0.004)"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd", "adamw", "adagrad"])
@pytest.mark.parametrize(("size", "stage"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_runs_of_processes_are_those_of_one(size: int, stage: int, kind: str, tmp_path: Path) -> None:
    one = trained(tmp_path / "one", 1, "allreduce", 3, kind)
    several = trained(tmp_path / "several", size, f"zero(stage={stage}, bucket_mb=0.004)", 3, kind)
    assert len(one["norms"]) == 12
    for name in one:
        torch.testing.assert_close(several[name], one[name], rtol=1e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sgd", "adamw", "adagrad"])
def test_from_two_to_four_to_one_to_two_members_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Epochs 0 and 3 train, those between only go through a checkpoint on another number of members."""
    cut = "zero(stage=2, bucket_mb=0.004)"
    straight = trained(tmp_path / "straight", 2, cut, 4, kind, "03")
    for epochs, size, strategy in ((1, 2, cut), (2, 4, cut), (3, 1, cut)):
        trained(tmp_path / "parts", size, strategy, epochs, kind, "03")
    assert alike(trained(tmp_path / "parts", 2, cut, 4, kind, "03"), straight)


@pytest.mark.slow
def test_another_strategy_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    cut, reduced = "zero(stage=1, bucket_mb=0.004)", "allreduce(bucket_mb=0.004)"
    straight = trained(tmp_path / "straight", 2, reduced, 3)
    for epochs, strategy in ((1, cut), (2, reduced)):
        trained(tmp_path / "parts", 2, strategy, epochs)
    assert alike(trained(tmp_path / "parts", 2, cut, 3), straight)
