"""The training that bench.serve follows: LeNet-5 on random images, a push every 0.1 s from each worker, until stopped.

Run by `paceline run --strategy async --servers 1`, with the folder of a file `stop` as its argument.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from bench._serve_model import ITEM, make

PUSH_EVERY_S = 0.1


def main() -> None:
    run = paceline.join(progress="off")
    torch.set_num_threads(1)
    model = make().train()
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    data = torch.utils.data.TensorDataset(torch.randn(64, *ITEM), torch.randint(10, (64,)))
    loader = run.loader(data, batch_size=8)
    for _ in run.epochs(1_000_000):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            time.sleep(PUSH_EVERY_S)
        if Path(sys.argv[1], "stop").exists():
            break


if __name__ == "__main__":
    main()
