"""The next token by a GPT, for `bench.serve --device` and for the bare loop that it is held against."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.models import GPT

VOCABULARY, TOKENS = 50257, 128
SMALL_VOCABULARY, SMALL_TOKENS = 512, 16


class NextToken(nn.Module):
    """The most likely token after the last one: logits of one position only, and one number out per item."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: Tensor) -> Tensor:
        gpt = self.gpt
        h = gpt.layers(gpt.token(tokens) + gpt.position.weight[: tokens.shape[1]])
        return F.linear(gpt.norm(h[:, -1]), gpt.token.weight).argmax(-1)


def make() -> nn.Module:
    """Of GPT-2 small's size: 12 layers, width 768, 12 heads, 124M parameters; random weights."""
    torch.manual_seed(0)
    return NextToken(GPT(vocabulary=VOCABULARY, context=1024, width=768, heads=12, layers=12)).eval()


def make_small() -> nn.Module:
    """The same with two layers of width 64, to try the benchmark where there is no GPU."""
    torch.manual_seed(0)
    return NextToken(GPT(vocabulary=SMALL_VOCABULARY, context=64, width=64, heads=4, layers=2)).eval()
