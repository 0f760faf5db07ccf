"""A GPT of which no member holds the whole, and what each will hold, told before anything runs.

    paceline run -n 2 --mesh shard=2 examples/sharded_gpt.py

The same as a table for all choices, without starting anything:

    paceline plan memory examples/sharded_gpt.py -n 2
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

CONTEXT, BATCH = 64, 16
TEXT = "\n".join(topics[name] for name in sorted(topics))  # Python's language reference
CHARACTERS = sorted(set(TEXT))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(CHARACTERS), width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))  # put together one at a time
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position.weight
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def make_model() -> nn.Module:
    return GPT()


def example_inputs() -> Tensor:
    return torch.zeros(BATCH, CONTEXT, dtype=torch.int64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=200_000, help="use so many characters")
    options = parser.parse_args()
    tokens = torch.tensor([CHARACTERS.index(c) for c in TEXT[: options.limit]])
    windows = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)

    run = paceline.join()
    if run.is_first:
        plan = paceline.memory_plan(make_model, example_inputs, members=run.size)
        here = plan.choice(run.settings.mesh, run.settings.strategy)
        whole = plan.choice()
        for name in "parameters", "gradients", "state", "activations", "at_once":
            mine, other = getattr(here, name), getattr(whole, name)
            print(f"plan: {name:11} {mine / 1e6:7.2f} MB on each member, {other / 1e6:7.2f} MB without a mesh")
    model = run.model(make_model)  # part by part: each member makes its own
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    loader = run.loader(TensorDataset(windows[:, :-1], windows[:, 1:]), batch_size=BATCH)

    for _ in run.epochs(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            run.clip_grad_norm(model, 1.0)
            optimizer.step()
            run.log(loss=loss)
    if run.is_first:
        print(f"last loss: {loss.item():.3f} per character")


if __name__ == "__main__":
    main()
