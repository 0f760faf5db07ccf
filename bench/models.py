"""The models that the benchmarks train: an MLP of 25M parameters, CNNs, small GPTs, one of GPT-2's size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its batch for one member, and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]  # (size, seed)
    batch_size: int

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def mlp() -> nn.Module:
    """25.2M parameters in three layers: much to reduce for little to compute."""
    return nn.Sequential(
        nn.Linear(1024, 3072), nn.ReLU(), nn.Linear(3072, 6144), nn.ReLU(), nn.Linear(6144, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )  # fmt: skip


def cnn() -> nn.Module:
    """Batch-normalised convolutions for 32 x 32 images, 1.0M parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in (32, 1), (64, 2), (128, 2), (256, 2), (256, 1):
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with tied embeddings."""

    def __init__(self, *, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)  # else it drowns the tokens for a thousand steps

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position.weight[: x.shape[1]]
        return F.linear(self.norm(self.layers(h)), self.token.weight)


def small_gpt() -> nn.Module:
    """3.3M parameters, context 64."""
    return GPT(vocabulary=512, context=64, width=256, heads=8, layers=4)


def small_cnn() -> nn.Module:
    """106,122 parameters for 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def fashion_cnn() -> nn.Module:
    """1.2M parameters for 28 x 28 images: two convolutions and two linear layers, as in PyTorch's MNIST example."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def character_gpt() -> nn.Module:
    """3.2M parameters, 128 characters, context 64."""
    return GPT(vocabulary=128, context=64, width=256, heads=8, layers=4)


def wide_gpt() -> nn.Module:
    """25M parameters, 128 characters, context 64."""
    return GPT(vocabulary=128, context=64, width=512, heads=8, layers=8)


def gpt2_small() -> nn.Module:
    """GPT-2 small: 12 layers, width 768, 124M parameters."""
    return GPT(vocabulary=50304, context=1024, width=768, heads=12, layers=12)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _features(size: int, seed: int) -> Batch:
    g = _generator(seed)
    return torch.randn(size, 1024, generator=g), torch.randint(10, (size,), generator=g)


def _images(size: int, seed: int) -> Batch:
    g = _generator(seed)
    return torch.randn(size, 3, 32, 32, generator=g), torch.randint(10, (size,), generator=g)


def _text(vocabulary: int, context: int) -> Callable[[int, int], Batch]:
    def make(size: int, seed: int) -> Batch:
        tokens = torch.randint(vocabulary, (size, context + 1), generator=_generator(seed))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return make


TASKS = {
    "mlp": Task(make=mlp, batch=_features, batch_size=32),
    "cnn": Task(make=cnn, batch=_images, batch_size=32),
    "gpt": Task(make=small_gpt, batch=_text(512, 64), batch_size=8),
    "gpt2": Task(make=gpt2_small, batch=_text(50304, 1024), batch_size=8),
}
