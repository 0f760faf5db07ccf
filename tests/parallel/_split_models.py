"""Models that tests split: written for one process, as anyone writes them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """With queries, keys and values of their own, or fused; the second way of each is written out."""

    def __init__(self, width: int, heads: int, fused: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_head, self.fused, self.dropout = heads, fused, dropout
        if fused:
            self.c_attn = nn.Linear(width, 3 * width)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size()
        shape = (batch, length, self.n_head, width // self.n_head)
        if self.fused:
            q, k, v = (part.view(shape).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
            p = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        else:
            q, k, v = (make(x).view(shape).transpose(1, 2) for make in (self.q_proj, self.k_proj, self.v_proj))
            scores = (q @ k.transpose(-2, -1)) / shape[-1] ** 0.5
            hidden = torch.ones(length, length).tril() == 0
            scores = scores.masked_fill(hidden, float("-inf"))
            y = F.dropout(F.softmax(scores, dim=-1), self.dropout, self.training) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, fused, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(
        self,
        fused: bool = True,
        tied: bool = False,
        width: int = 48,
        heads: int = 4,
        words: int = 37,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(10, width)
        self.h = nn.ModuleList(Block(width, heads, fused, dropout) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Encoder(nn.Module):
    """torch's own layers."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 48)
        layer = nn.TransformerEncoderLayer(48, 4, 101, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attend = nn.MultiheadAttention(48, 4, kdim=48, vdim=48, batch_first=batch_first)
        self.out = nn.Linear(48, 37)
        self.turn = not batch_first

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x.transpose(0, 1) if self.turn else x
        x = self.encoder(x, src_key_padding_mask=ids == 0)
        seen, weights = self.attend(x, x.flip(0 if self.turn else 1), x)
        x = x.transpose(0, 1) + seen.transpose(0, 1) if self.turn else x + seen
        return self.out(x * weights.square().sum(-1, keepdim=True))


class MLP(nn.Module):
    """Sizes that do not divide evenly, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 20)
        self.net = nn.Sequential(nn.Linear(20, 133), nn.ReLU(), nn.Dropout(0.0), nn.Linear(133, 20), nn.BatchNorm1d(9))
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(20, 51), nn.Linear(20, 51), nn.Linear(51, 37)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.net(self.embed(ids))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Towers(nn.Module):
    """Branches that are joined by cat, then some that are mixed by weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 20)
        self.left = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 10))
        self.right = nn.Sequential(nn.Linear(20, 15), nn.LayerNorm(15), nn.Linear(15, 6))
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 37)) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = torch.cat([self.left(x), self.right(x)], dim=-1)
        weights = F.softmax(self.gate(x), dim=-1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


GPT_PLAN = {
    "h.*.c_attn": "qkv",
    "h.*.attn.c_proj": "row",
    "h.*.mlp.0": "column",
    "h.*.mlp.2": "row",
    "wte": "vocabulary",
    "lm_head": "vocabulary",
}
ODD_PLAN = {"h.*.c_attn": "column", "h.0.mlp.0": "column", "h.1.mlp.2": "row", "wpe": "column", "lm_head": "vocabulary"}
CASES = {  # the model, and what run.model is given
    "mlp": (MLP, {}),
    "gpt": (GPT, {}),
    "gpt-unfused": (lambda: GPT(fused=False), {}),
    "gpt-tied": (lambda: GPT(tied=True), {"split": GPT_PLAN}),
    "gpt-vocabulary": (GPT, {"split": GPT_PLAN}),
    "gpt-sequence": (GPT, {"split": GPT_PLAN, "sequence": True}),
    "gpt-recompute": (lambda: GPT(fused=False), {"sequence": True, "recompute": True}),
    "gpt-odd": (GPT, {"split": ODD_PLAN}),
    "encoder": (Encoder, {}),
    "encoder-sequence": (lambda: Encoder(batch_first=False), {"sequence": True}),
    "towers": (Towers, {"split": {"left": 0, "right": 1, "experts.*": "branch"}}),
}
