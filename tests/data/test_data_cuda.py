"""Batches on a CUDA device, copied ahead on a stream of their own. Skipped where there is none."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from paceline.data import Loader
from paceline.data.batches import VERY_SLOW_S

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WIDTH = 1 << 18  # large enough that a copy which nobody waited for would show


class Rows(Dataset[Any]):
    """Row i is full of i; reading one is slow enough to move to the background."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(VERY_SLOW_S)
        return {"row": torch.full((WIDTH,), float(index)), "index": index}


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_whole_although_memory_is_reused(workers: int) -> None:
    loader = Loader(Rows(), batch_size=2, device="cuda", workers=workers)
    busy = torch.randn(2048, 2048, device="cuda")
    seen: list[int] = []
    checks = []
    for batch in loader:
        assert batch["row"].is_cuda
        for _ in range(20):  # the training stream lags behind, so memory given back too soon would be overwritten
            busy = (busy @ busy).tanh()
        checks.append((batch["row"] == batch["index"][:, None]).all())
        seen += batch["index"].tolist()
        del batch
    assert all(bool(check) for check in checks)
    assert sorted(seen) == list(range(24))


def test_quick_batches_and_tensors_that_are_already_there() -> None:
    here = torch.arange(40.0).view(20, 2)
    for data in (TensorDataset(here), TensorDataset(here.cuda())):
        got = torch.cat([batch[0] for batch in Loader(data, batch_size=3, device="cuda", shuffle=False)])
        assert got.is_cuda
        assert torch.equal(got.cpu(), here)
