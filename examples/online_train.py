"""The run of examples/online.py: it learns from what is uploaded, as it comes, and from nothing else.

    paceline run -n 2 --strategy async --name online examples/online_train.py

`make_model` and `example_inputs` are for `paceline serve`, which makes the same model from this file.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import paceline


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def example_inputs() -> torch.Tensor:
    return torch.zeros(2, 8, 8)


def main() -> None:
    run = paceline.join()
    torch.manual_seed(run.seed)
    model = make_model()
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=3e-3), model)
    uploads = run.uploads(like=(torch.zeros(8, 8), 0))  # a sample of another form is refused where it is uploaded
    loader = run.loader(uploads, batch_size=16)
    for _ in run.epochs(1):  # it lasts until finish_uploads()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


if __name__ == "__main__":
    main()
