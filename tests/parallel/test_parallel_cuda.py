"""Every precision in a run on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.core.errors import ConfigError
from paceline.parallel import fp8

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("precision", ["bf16", "bf16(weights)", "fp16", "fp8", "fp8(weights)"])
def test_a_model_learns(join: Callable[..., Any], precision: str) -> None:
    if precision.startswith("fp8"):
        try:
            fp8.check_device(torch.device("cuda:0"))
        except ConfigError as error:
            pytest.skip(str(error))
    run = join(precision, device="cuda:0")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    model.to(run.device)
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    x, y = torch.randn(37, 16, device=run.device), torch.randint(4, (37,), device=run.device)
    for _ in range(80):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert loss.dtype == torch.float32
    assert loss.item() < 0.3
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
