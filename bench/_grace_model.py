"""ResNet-20 for `bench.grace`: many copies of it at once, each with weights, batch and gradients of its own.

Activations are [copy, image, height, width, channel]; parameters are flat rows [copy, NUMEL] in the order and memory
layout of the usual PyTorch module (a convolution's weights are output, input, 3, 3). Shortcuts have no parameters:
every second pixel, and zeros in the new channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

CHANNELS_IN = 16  # of images: three, and zeros, so that kernels have enough to multiply

ConvNorm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, int], Tensor]


def _layers() -> list[tuple[int, int, int]]:
    """(input channels, output channels, stride) of the convolutions."""
    layers, before = [(3, 16, 1)], 16
    for channels in (16, 32, 64):
        for i in range(6):
            layers.append((before, channels, 2 if i == 0 and channels > 16 else 1))
            before = channels
    return layers


LAYERS = _layers()
SHAPES: dict[str, tuple[int, ...]] = {}
for _i, (_before, _channels, _) in enumerate(LAYERS):
    SHAPES |= {
        f"conv{_i}.weight": (_channels, _before, 3, 3),
        f"norm{_i}.weight": (_channels,),
        f"norm{_i}.bias": (_channels,),
    }
SHAPES |= {"fc.weight": (10, 64), "fc.bias": (10,)}
SIZES = [math.prod(shape) for shape in SHAPES.values()]
NUMEL = sum(SIZES)
NUM_BUFFERED = sum(2 * channels for _, channels, _ in LAYERS)  # running means and variances


def initial(seed: int) -> Tensor:
    """One row of parameters."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for name, shape in SHAPES.items():
        if name.startswith("conv"):
            parts.append(torch.randn(shape, generator=generator) * math.sqrt(2 / (9 * shape[0])))
        elif name.startswith("fc"):
            parts.append((2 * torch.rand(shape, generator=generator) - 1) / 8)
        else:
            parts.append(torch.full(shape, 1.0 if name.endswith("weight") else 0.0))
    return torch.cat([p.view(-1) for p in parts])


def running_of(copies: int, device: torch.device) -> list[Tensor]:
    """Fresh running means and variances, [copy, 2, channel] for each layer."""
    fresh = [torch.zeros(copies, 2, channels, device=device) for _, channels, _ in LAYERS]
    for pair in fresh:
        pair[:, 1] = 1
    return fresh


def conv_norm(
    x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor, shortcut: Tensor | None, running: Tensor, stride: int
) -> Tensor:
    """Convolution 3 x 3, batch norm, a shortcut where there is one, and the rectifier. w: [copy, tap, input, output]"""
    y = _convolve(x, w, stride).float()
    num = y[0, ..., 0].numel()
    mean = y.mean((1, 2, 3), keepdim=True)
    variance = (y - mean).square().mean((1, 2, 3), keepdim=True)
    with torch.no_grad():
        now = torch.stack((mean.flatten(1), variance.flatten(1) * num / (num - 1)), 1)
        running.mul_(0.9).add_(now, alpha=0.1)
    return _finish(y, mean, variance, gamma, beta, shortcut).to(x.dtype)


def conv_norm_in_use(
    x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor, shortcut: Tensor | None, running: Tensor, stride: int
) -> Tensor:
    """The same with the running statistics."""
    mean, variance = (part[:, None, None, None] for part in running.unbind(1))
    return _finish(_convolve(x, w, stride).float(), mean, variance, gamma, beta, shortcut).to(x.dtype)


def _convolve(x: Tensor, w: Tensor, stride: int) -> Tensor:
    copies, images, height, width, c = x.shape
    o = w.shape[-1]
    planes = x.permute(1, 0, 4, 2, 3).reshape(images, copies * c, height, width)
    weights = w.to(x.dtype).permute(0, 3, 2, 1).reshape(copies * o, c, 3, 3)
    y = F.conv2d(planes, weights, stride=stride, padding=1, groups=copies)
    return y.view(images, copies, o, *y.shape[2:]).permute(1, 0, 3, 4, 2)


def _finish(y: Tensor, mean: Tensor, variance: Tensor, gamma: Tensor, beta: Tensor, shortcut: Tensor | None) -> Tensor:
    y = (y - mean) * torch.rsqrt(variance + 1e-5) * gamma[:, None, None, None] + beta[:, None, None, None]
    return F.relu(y if shortcut is None else y + shortcut.float())


def parameters_of(rows: Tensor) -> list[Tensor]:
    """Flat rows as parameters, [copy, ...] each."""
    parts = torch.split(rows, SIZES, 1)
    return [part.reshape(len(rows), *shape) for part, shape in zip(parts, SHAPES.values())]


def logits(parameters: Sequence[Tensor], x: Tensor, running: Sequence[Tensor], layer: ConvNorm) -> Tensor:
    """[copy, image, 10] from [copy, image, 32, 32, CHANNELS_IN]."""
    shortcut: Tensor | None = None
    for i, (before, channels, stride) in enumerate(LAYERS):
        w, gamma, beta = parameters[3 * i : 3 * i + 3]
        w = w.flatten(3).permute(0, 3, 2, 1)  # copy, tap, input, output
        if i == 0:
            w = F.pad(w, (0, 0, 0, CHANNELS_IN - before))
        if i % 2 == 1:
            shortcut = x
            if stride == 2:
                shortcut = F.pad(x[:, :, ::2, ::2], ((channels - before) // 2, (channels - before) // 2))
        x = layer(x, w, gamma, beta, shortcut if i and i % 2 == 0 else None, running[i], stride)
    return torch.baddbmm(parameters[-1][:, None], x.float().mean((2, 3)), parameters[-2].transpose(1, 2))


def gradients(
    rows: Tensor, x: Tensor, labels: Tensor, running: Sequence[Tensor], layer: ConvNorm
) -> tuple[Tensor, Tensor]:
    """The loss of each copy, and its gradient as flat rows."""
    parameters = [p.detach().requires_grad_() for p in parameters_of(rows)]
    found = logits(parameters, x, running, layer)
    losses = F.cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)
    parts = torch.autograd.grad(losses.sum(), parameters)
    return losses.detach(), torch.cat([part.flatten(1) for part in parts], 1)
