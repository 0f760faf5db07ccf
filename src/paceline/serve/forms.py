"""In which form a model computes: its precision, how its memory lies, and whether it is run, compiled or exported.

All forms keep the model's own parameters and take their values anew at each batch, so that a version can be swapped in
under any of them; what folds weights into code (frozen graphs) cannot follow a training and is not here.

`compile` is torch.compile, once per size, for sizes of powers of two: batches between them are filled up. `export` is
the graph of torch.export, with a free first dimension. int8 quantizes linear layers: rows of weights when they are
swapped in, activations as they come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.serve.fields import Field, zeros

Forward = Callable[..., Any]
CHANNELS_LAST = "channels last"


def set_precision(model: nn.Module, precision: str) -> Forward:
    """Change the model in place; what takes inputs as they come in."""
    if precision == "bf16":
        model.to(torch.bfloat16)
        return lambda *xs: model(*[x.to(torch.bfloat16) if x.is_floating_point() else x for x in xs])
    if precision == "int8":
        if (device := device_of(model)).type != "cpu":
            raise ConfigError(f"--precision int8 computes on the CPU, not on {device}: take bf16 there")
        found = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if type(child) is nn.Linear
        ]
        if not found:
            raise ConfigError("--precision int8 changes linear layers, and this model has none: leave it out, or bf16")
        for parent, name, linear in found:
            setattr(parent, name, Int8Linear(linear))
    return model


class Int8Linear(nn.Module):
    """A linear layer whose weights are rounded to eight bits per row, and whose inputs are as they come.

    Keeps `weight` and `bias` as they were, which is where a new version is put; what was made of them is made again
    when they lie elsewhere.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._packed: Any = None
        self._of: tuple[int, int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        of = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        if of != self._of:
            scale = weight.detach().float().abs().amax(1).clamp_min(1e-12) / 127
            zero = torch.zeros(len(weight), dtype=torch.int64)
            quantized = torch.quantize_per_channel(weight.detach().float(), scale, zero, 0, torch.qint8)
            bias = None if self.bias is None else self.bias.detach().float()
            self._packed = torch.ops.quantized.linear_prepack(quantized, bias)
            self._of = of
        made: torch.Tensor = torch.ops.quantized.linear_dynamic(x, self._packed, reduce_range=True)
        return made


def lay_out(model: nn.Module, layout: str) -> None:
    """Change the strides of images' weights in place, which versions that are swapped in take over."""
    wanted = torch.channels_last if layout == CHANNELS_LAST else torch.contiguous_format
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=wanted)


def formed(form: str, forward: Forward, model: nn.Module, inputs: Sequence[Field], most: int) -> Forward:
    """What computes; ConfigError where this model cannot be put into that form."""
    try:
        if form == "compile":
            return torch.compile(forward, dynamic=False)
        if form == "export":
            return _exported(forward, model, inputs, most)
    except Exception as error:
        raise ConfigError(f"--compile {form}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    return forward


def device_of(model: nn.Module) -> torch.device:
    """Where its first tensor lies."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def sizes(form: str, most: int) -> list[int]:
    """The sizes of batches that a form knows; []: any.

    >>> sizes("compile", 20), sizes("eager", 20)
    ([1, 2, 4, 8, 16, 20], [])
    """
    if form != "compile":
        return []
    return [1 << k for k in range(most.bit_length()) if 1 << k < most] + [most]


def _exported(forward: Forward, model: nn.Module, inputs: Sequence[Field], most: int) -> Forward:
    if forward is not model:
        raise ConfigError("the graph is exported in fp32 only")
    device = device_of(model)
    if most == 1:
        return torch.export.export(model, tuple(zeros(inputs, 1, device))).module()
    example = tuple(zeros(inputs, 2, device))
    batch = torch.export.Dim("batch", min=1, max=most)
    return torch.export.export(model, example, dynamic_shapes=tuple({0: batch} for _ in inputs)).module()
