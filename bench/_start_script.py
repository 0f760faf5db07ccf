"""The script that `bench.start` has started: a tiny model, by DDP under torchrun and by Paceline under `paceline run`.

Each member says when it has taken its first step, and when it began, on the clock that all processes share.
"""

import os
import time

began = time.monotonic()

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(0)
dataset = TensorDataset(torch.randn(256, 64, generator=generator), torch.randint(10, (256,), generator=generator))
if "PACELINE_RANK" in os.environ:
    import paceline

    run = paceline.join()
    optimizer = run.optimizer(optimizer, model)
    loader = run.loader(dataset, batch_size=32)
else:
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step == 0:
        print(f"began {began:.4f} stepped {time.monotonic():.4f}", flush=True)
if "PACELINE_RANK" not in os.environ:
    dist.destroy_process_group()
