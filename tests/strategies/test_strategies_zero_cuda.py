"""The optimizer in host memory, of a model on a CUDA device: the same weights, and nothing of it on the device."""

from __future__ import annotations

import pytest
import torch
from _zero import OPTIMIZERS, Net, batch, close

from paceline.strategies import World, Zero
from paceline.transport.group import solo

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def trained(
    strategy: Zero | None, name: str, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    model = Net().to("cuda", dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    if strategy:
        strategy.attach(model, optimizer, World(solo()))
    for step in range(10):
        optimizer.zero_grad()
        model(batch(step, 0).to("cuda", dtype)).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if strategy is None or strategy.finish(optimizer):
            optimizer.step()
    return {n: t.float().cpu() for n, t in model.state_dict().items()}, optimizer


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_of_one_is_plain_pytorch_with_less_on_the_device(name: str, stage: int) -> None:
    strategy = Zero(stage=stage, bucket_mb=0.02, offload="optimizer")
    weights, optimizer = trained(strategy, name, torch.float32)
    plain, _ = trained(None, name, torch.float32)
    close(weights, plain, atol=1e-4)
    assert not optimizer.state
    (share,) = strategy._shares.values()
    state = [t for each in share._inner.state.values() for t in each.values() if isinstance(t, torch.Tensor)]
    assert state
    assert all(t.device.type == "cpu" for t in state)
    strategy.close()


def test_half_precision_has_a_finer_copy() -> None:
    strategy = Zero(offload="optimizer", bucket_mb=0.02)
    weights, _ = trained(strategy, "adamw", torch.bfloat16)
    exact, _ = trained(None, "adamw", torch.float32)
    close(weights, exact, atol=0.05)
    (share,) = strategy._shares.values()
    owns = list(share._by_start.values())
    assert all(own.tensor.dtype == torch.float32 and own.tensor.is_pinned() for own in owns)
    strategy.close()
