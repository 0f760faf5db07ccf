"""Our collectives as PyTorch calls them, between real processes: each against what it has to give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch, torch.distributed as dist, paceline
from paceline.transport.torch_backend import with_torch

run = paceline.join(progress="off", checkpoint_keep=0)
with_torch(run.group)
with_torch(run.group)  # once more is no matter
rank, size = dist.get_rank(), dist.get_world_size()
assert (rank, size, dist.get_backend()) == (run.rank, run.size, "paceline")
mine = torch.arange(6.0) + 10 * rank
rows = torch.stack([torch.arange(6.0) + 10 * r for r in range(size)])


def same(found, wanted):
    torch.testing.assert_close(found, wanted)


for op, wanted in (("SUM", rows.sum(0)), ("AVG", rows.mean(0)), ("MAX", rows.amax(0)), ("PRODUCT", rows.prod(0))):
    found = mine.clone()
    dist.all_reduce(found, getattr(dist.ReduceOp, op))
    same(found, wanted)
work = dist.all_reduce(found := mine.clone(), async_op=True)
work.wait()
same(found, rows.sum(0))
whole = torch.empty(size * 6)
dist.all_gather_into_tensor(whole, mine)
same(whole, rows.flatten())
parts = [torch.empty(6) for _ in range(size)]
dist.all_gather(parts, mine)
same(torch.stack(parts), rows)
part = torch.empty(2)
for op, wanted in (("SUM", rows.sum(0)), ("AVG", rows.mean(0)), ("MAX", rows.amax(0))):
    dist.reduce_scatter_tensor(part, mine.clone(), getattr(dist.ReduceOp, op))
    same(part, wanted[2 * rank : 2 * rank + 2])
found = mine.clone()
dist.broadcast(found, 1)
same(found, rows[1])
given = [mine[2 * r : 2 * r + 2].clone() for r in range(size)]
taken = [torch.empty(2) for _ in range(size)]
dist.all_to_all(taken, given)
same(torch.cat(taken), rows[:, 2 * rank : 2 * rank + 2].flatten())
out = torch.empty(6)
dist.all_to_all_single(out, mine)
same(out, torch.cat(taken))
after, before = (rank + 1) % size, (rank - 1) % size
works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, found, before)])
for work in works:
    work.wait()
same(found, rows[before])
pair = dist.new_group([0, 2])
if rank in (0, 2):
    found = mine.clone()
    dist.all_reduce(found, group=pair)
    same(found, rows[0] + rows[2])
dist.barrier()
try:
    dist.all_reduce(mine, dist.ReduceOp.BAND)
except paceline.ConfigError as error:
    assert "allowed are sum, mean" in str(error)
else:
    raise AssertionError
print("DONE", flush=True)
"""


def test_every_collective_gives_what_it_has_to(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "-n", "3", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("DONE") == 3
    assert "Traceback" not in done.stderr
