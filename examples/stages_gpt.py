"""A character GPT whose layers lie on several members, one part of them after the other.

    paceline run -n 2 --mesh stage=2 examples/stages_gpt.py --text book.txt

Batches go through the stages in pieces. The same script trains in one process: python examples/stages_gpt.py. Without
--text it reads what every Python brings along: the language reference, from which `help()` answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.between(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight  # one tensor, which the first and the last stage have

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, help="any text file; default: Python's language reference")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--limit", type=int, help="use only so many characters")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved or zero-bubble")
    options = parser.parse_args()
    text = options.text.read_text() if options.text else "\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text[: options.limit]))
    tokens = torch.tensor([characters.index(c) for c in text[: options.limit]])
    windows = tokens.unfold(0, options.context + 1, options.context)
    cut = len(windows) * 9 // 10
    train, test = (TensorDataset(part[:, :-1], part[:, 1:]) for part in (windows[:cut], windows[cut:]))

    def make() -> GPT:
        return GPT(len(characters), options.context)

    run = paceline.join()
    if run.is_first:
        batch = torch.zeros(options.batch_size, options.context, dtype=torch.int64)
        plan = paceline.memory_plan(make, batch, members=run.size)
        here, whole = plan.choice(run.settings.mesh, run.settings.strategy), plan.choice()
        for name in "parameters", "gradients", "state", "activations", "at_once":
            mine, other = getattr(here, name), getattr(whole, name)
            print(f"plan: {name:11} {mine / 1e6:7.2f} MB on the fullest stage, {other / 1e6:7.2f} MB without a mesh")
    torch.manual_seed(run.seed)
    example = train[:4][0]  # layers are timed on it, so that stages take equally long
    model = run.model(make(), like=example, schedule=options.schedule)
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    loader = run.loader(train, batch_size=options.batch_size)

    for _ in run.epochs(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = run.backward(model, x, y, loss=loss_of)
            run.clip_grad_norm(model, 1.0)
            optimizer.step()
            run.log(loss=loss)

    def measure(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"test_loss": F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")}

    result = run.evaluate(measure, test, batch_size=64)
    print(f"member {run.rank} holds {sum(p.numel() for p in model.parameters())} numbers")
    if run.is_first:
        print(f"test loss: {result['test_loss']:.3f} per character")


if __name__ == "__main__":
    main()
