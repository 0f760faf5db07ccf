"""Tensors in parts that stand for the whole: every rule, forward and backward, against the whole; what has no rule; and
random numbers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from paceline.parallel.lay import Lay, even
from tests.parallel._runs import run

# Each line: of x (in parts along `dim`) and w (whole), and whether it is done on parts.
RULES = """
import torch, torch.distributed as dist, paceline
from torch.nn import functional as F
from paceline.core.errors import ConfigError
from paceline.parallel import rules_of_heads
from paceline.parallel.fellows import Fellows, part
from paceline.parallel.lay import Lay, even
from paceline.parallel.spread import GATHERED, Spread, wholes
from paceline.transport.torch_backend import with_torch

run = paceline.join(progress="off", checkpoint_keep=0)
with_torch(run.group)
fellows = Fellows(dist.group.WORLD)
torch.set_default_dtype(torch.float64)
ids = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(1))
LINES = [
    ((3, 5, 8), 2, "F.gelu(x) * 2 + w[:8] - x / 3"),
    ((3, 5, 7), 2, "torch.where(x > 0, x, w[:7]) * w[:3, None, None]"),
    ((3, 5, 7), 1, "F.layer_norm(x, (7,), w[:7], w[7:14])"),
    ((3, 5, 7), 1, "F.linear(x, w[:14].view(2, 7), w[:2])"),
    ((3, 5, 8), 2, "F.linear(x, w[:16].view(2, 8), w[:2])"),
    ((3, 5, 8), 2, "F.linear(x.relu(), w[:16].view(2, 8)) + x.sum(-1, keepdim=True)"),
    ((3, 5, 8), 2, "x.view(3, 5, 4, 2).transpose(1, 2).contiguous().transpose(1, 2).reshape(3, 5, 8)"),
    ((3, 5, 8), 2, "x.view(3, 5, 4, 2).permute(0, 2, 1, 3).softmax(-1) @ w[:4].view(2, 2)"),
    ((3, 4, 5, 2), 1, "F.scaled_dot_product_attention(x, x * 2, x, w[:25].view(5, 5))"),
    ((3, 4, 5, 2), 1, "(x @ x.transpose(-2, -1)).masked_fill(w[:25].view(5, 5) > 0, -9.0) @ x"),
    ((3, 5, 7), 2, "x.log_softmax(-1)"),
    ((3, 5, 7), 2, "F.softmax(x, dim=-1) + x.mean((0, 2), keepdim=True)"),
    ((3, 5, 8), 2, "x[:, 1:3, None].unsqueeze(0).flatten(1, 2) + x[..., 0, :].sum(0)"),
    ((3, 5, 8), 2, "torch.stack([a * 2 for a in x.unbind(1)[0].chunk(3)]) if 0 else sum(x.unbind(1))"),
    ((15, 7), 1, "F.cross_entropy(x, ids.flatten() % 7, label_smoothing=0.1)"),
    ((3, 7, 5), 1, "F.cross_entropy(x, ids.where(ids != 2, -100), reduction='sum')"),
    ((15, 7), 1, "F.nll_loss(F.log_softmax(x, -1), ids.flatten())"),
    ((7, 4), 0, "F.embedding(ids, x, padding_idx=2)"),
    ((7, 4), 1, "F.embedding(ids, x)"),
    ((8, 4), 0, "F.linear(w[:12].view(3, 4), x, w[:8])"),
    ((8, 4), 1, "torch.addmm(w[:4], w[:16].view(2, 8), x)"),
    ((3, 5, 8), 2, "x.roll(1, -1)", "roll"),
    ((3, 5, 8), 2, "x.cumsum(-1)", "cumsum"),
    ((3, 5, 8), 2, "x.view(3, 5, 2, 4).sum(2)" if run.size == 4 else "x.view(3, 5, 2, 4)"),
    ((3, 5, 7), 2, "x[..., 1:3] * 2", "__getitem__"),
    ((15, 7), 1, "F.cross_entropy(x, ids.flatten(), w[:7].detach().abs())", "cross_entropy"),
    ((15, 7), 1, "torch.einsum('ij,kj->ik', x, x)", "einsum"),
    ((3, 5, 8), 2, "torch.cat([x, x], -1)", "cat"),
    ((3, 5, 8), 2, "torch.cat(torch.chunk(x, chunks=2, dim=-1)[::-1], -1)", "chunk"),
    ((3, 5, 8), 2, "torch.sum(input=x, dim=-1)", "sum"),
    ((3, 5, 8), 2, "F.linear(input=x, bias=w[:2], weight=w[:16].view(2, 8))"),
    ((3, 5, 8), 2, "x * len(torch.where(x > 0)[0])", "where"),
]
for shape, dim, text, *gathered in LINES:
    torch.manual_seed(3)
    values, w0 = torch.randn(shape), torch.randn(30)
    lay = Lay(dim, (even(shape[dim], run.size),))
    ends = []
    for split in (True, False):
        leaf, w = values.clone().requires_grad_(), w0.clone().requires_grad_()
        x = Spread(part(leaf, fellows, lay), lay, fellows) if split else leaf
        GATHERED.clear()
        out = eval(text)
        if split and run.size == 2:
            assert list(GATHERED) == gathered, (text, GATHERED)
        if isinstance(out, Spread):
            assert out.local.numel() < out.numel(), text
            out = out.whole()
        (out * torch.arange(1.0, 1 + out.numel()).view_as(out).cos()).sum().backward()
        ends.append((out.detach(), leaf.grad, w.grad))
    for mine, wanted in zip(*ends):
        torch.testing.assert_close(mine, wanted, msg=lambda m: f"{text}: {m}")

# queries, keys and values in one
values = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
lay = Lay(1, (even(8, run.size),) * 3)
fused = Spread(lay.part(values, run.rank), lay, fellows)
GATHERED.clear()
for mine, wanted in [*zip(fused.split(8, 1), values.split(8, 1)), *zip(fused.chunk(3, -1), values.chunk(3, -1))]:
    assert torch.equal(mine.whole(), wanted)
q, k, v = fused.view(3, 3, 4, 2).unbind(1)
assert torch.equal(k.whole(), values.view(3, 3, 4, 2)[:, 1]) and not GATHERED
assert torch.equal(fused.view(3, 4, 6), values.view(3, 4, 6)) and GATHERED  # heads first: put together
assert tuple(fused.shape) == (3, 24) and fused.numel() == 72 and "local=(3, " in repr(fused)
def put(x): x[:, 2] = 0.0
def put_more(x): x[:, 2:5] += 1.0
for change in (lambda x: x.cumsum_(1), put, put_more):
    try:
        change(fused.clone())
    except ConfigError as error:
        assert "cannot be changed in place" in str(error)
    else:
        raise AssertionError("a part was changed in place")
def later(x):
    piece = x[:, 2:5]
    piece += 1.0
    return x * 2
def dropped(x):
    x.narrow(1, 2, 3).mul_(2)
    return torch.cat([x, x])
def through_a_view(x):
    x.unsqueeze(0)[..., 2:5].relu_()
    return F.linear(input=torch.ones(1, 24), weight=x)
for change in (later, dropped, through_a_view):
    try:
        change(fused.clone())
    except ConfigError as error:
        assert "was changed in place, and the tensor is used again" in str(error)
    else:
        raise AssertionError("a change of a piece was missed")
piece = (given := fused.clone())[:, 2:5]
piece += 1.0  # nobody asks for the tensor again
assert torch.equal(piece, values[:, 2:5] + 1)
given = fused.clone()
rows, copies = given[1:], given[:, [2, 3]]  # a view, and what is a copy with plain tensors too
rows += 1.0
copies += 1.0
assert torch.equal(given.whole(), torch.cat([values[:1], values[1:] + 1])) and not given.taken
with torch.inference_mode():
    inside = fused.clone()
    inside[:, 2:5].mul_(2)
    inside * 2  # such tensors count no changes: nothing is said, and nothing fails
ys = fused.clone()
ys += 1
ys.data.mul_(2)
assert torch.equal(ys.whole(), 2 * (values + 1))

# random numbers
torch.manual_seed(5)
whole = F.dropout(torch.ones(64))
parts = [F.dropout(Spread(torch.ones(64), Lay(0, ((64,) * run.size,)), fellows)) for _ in range(2)]
after = torch.rand(4)
rows = run.group.all_gather(torch.cat([whole, after]))
assert all(torch.equal(row, rows[0]) for row in rows)  # of a whole tensor: the same on all
masks = [row for p in parts for row in p.whole().view(run.size, 64)]
assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])  # of parts: each its own
torch.manual_seed(5)
F.dropout(torch.ones(64))
again = [F.dropout(Spread(torch.ones(64), Lay(0, ((64,) * run.size,)), fellows)) for _ in range(2)]
assert all(torch.equal(a.local, b.local) for a, b in zip(parts, again)) and torch.equal(torch.rand(4), after)
print("RIGHT", flush=True)
"""


def told(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, done.stderr
    return done.stdout.count("RIGHT")


def test_what_is_computed_on_parts_is_what_the_whole_gives(tmp_path: Path) -> None:
    assert told(run(tmp_path, RULES, "-n", "2")) == 2


@pytest.mark.slow
def test_it_is_so_where_members_have_nothing(tmp_path: Path) -> None:
    """Five or seven over four: some have less than others, some have none."""
    assert told(run(tmp_path, RULES, "-n", "4")) == 4


@pytest.mark.parametrize("blocks", [((3, 3),), ((4, 3), (2, 1)), ((0, 5),), (even(5, 4),)])
def test_parts_make_the_whole(blocks: tuple[tuple[int, ...], ...]) -> None:
    lay = Lay(1, blocks)
    whole = torch.arange(2.0 * lay.whole).view(2, -1)
    parts = [lay.part(whole, rank) for rank in range(len(blocks[0]))]
    assert [p.shape[1] for p in parts] == [lay.own(rank) for rank in range(len(parts))]
    assert torch.equal(lay.join(parts), whole)
