"""What tests of engines start, and from where."""

from __future__ import annotations

from pathlib import Path

LIMIT_S = 400.0  # a busy machine is no failure
SOURCES = str(Path(__file__).parents[2] / "src")
LONG = """
import time, torch, paceline
run = paceline.join()
model = torch.nn.Linear(2, 1)
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
data = torch.utils.data.TensorDataset(torch.ones(40000, 2), torch.ones(40000, 1))
loader = run.loader(data, batch_size=4)
for epoch in run.epochs(50):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        time.sleep(0.02)
        if step % 10 == 0:
            print("step", step, "size", run.size, flush=True)
"""
