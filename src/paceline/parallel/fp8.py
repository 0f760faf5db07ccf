"""Linear layers in fp8: products of 8-bit floats with one scale per tensor, taken from the tensor itself.

    y  = x·Wᵀ      x and W in e4m3 (4 bits of exponent, 3 of mantissa)
    ∂x = ∂y·W      ∂y in e5m2, whose range gradients need; W in e4m3
    ∂W = ∂yᵀ·x     ∂y in e5m2; x in e4m3

A tensor t is written as q = t·s with s = largest(q)/max|t|, and the product of two is divided by both scales; it sums
in float32 (torch._scaled_mm). The scales need no history, so a resumed run is exact.
Weights stay what they are (float32, or bf16 with masters); biases and everything else run under bf16 autocast.

Devices that have it: NVIDIA GPUs of compute capability 8.9 and later (Ada, Hopper, Blackwell). Without one, `emulated`
rounds as they do and multiplies in float32: for tests, since nothing is saved by it.

Reference: Micikevicius et al., FP8 formats for deep learning, 2022.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from paceline.core.errors import ConfigError

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # what the products want dimensions to be a multiple of
_CAPABILITY = (8, 9)
_CLASSES: dict[type, type] = {}


class Scaled(NamedTuple):
    """A matrix in fp8, and what its numbers are to be multiplied with."""

    q: torch.Tensor
    inverse: torch.Tensor  # 1/s, float32

    @property
    def t(self) -> Scaled:
        return Scaled(self.q.t(), self.inverse)


def scaled(x: torch.Tensor, dtype: torch.dtype) -> Scaled:
    """`x` in fp8. All zeros have a scale too; what has a number that is not finite becomes nan.

    >>> scaled(torch.tensor([[1.0, -2.0]]), FORWARD).q
    tensor([[ 224., -448.]], dtype=torch.float8_e4m3fn)
    """
    top = torch.finfo(dtype).max
    largest = x.detach().abs().amax().float()
    s = top / largest.clamp(min=1e-12)
    # Rounding must not push the largest one over the top, where it would be infinite or nan.
    return Scaled((x.float() * s).clamp(-top, top).to(dtype), 1.0 / s)


def product(a: Scaled, b: Scaled, dtype: torch.dtype, *, emulated: bool) -> torch.Tensor:
    """a·b."""
    if emulated:
        return ((a.q.float() @ b.q.float()) * (a.inverse * b.inverse)).to(dtype)
    left = a.q.contiguous()  # rows one after the other, and of the right one columns
    right = b.q.t().contiguous().t()
    return torch._scaled_mm(left, right, scale_a=a.inverse, scale_b=b.inverse, out_dtype=dtype)


class _Linear(torch.autograd.Function):
    """x·Wᵀ of a matrix x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, emulated: bool) -> torch.Tensor:
        x8, w8 = scaled(x, FORWARD), scaled(weight, FORWARD)
        ctx.save_for_backward(*x8, *w8)
        ctx.dtypes, ctx.emulated = (x.dtype, weight.dtype), emulated
        return product(x8, w8.t, torch.bfloat16, emulated=emulated)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        xq, x_inverse, wq, w_inverse = ctx.saved_tensors
        x8, w8, g8 = Scaled(xq, x_inverse), Scaled(wq, w_inverse), scaled(grad, BACKWARD)
        of_x = of_w = None
        if ctx.needs_input_grad[0]:
            of_x = product(g8, w8, torch.bfloat16, emulated=ctx.emulated).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            # float32: the sum over a batch is what masters are stepped with
            of_w = product(_rows(g8).t, _rows(x8), torch.float32, emulated=ctx.emulated).to(ctx.dtypes[1])
        return of_x, of_w, None


def _rows(m: Scaled) -> Scaled:
    """With rows of zeros behind, up to a multiple."""
    missing = -m.q.shape[0] % MULTIPLE
    if not missing:
        return m
    padded = m.q.new_zeros(m.q.shape[0] + missing, m.q.shape[1])
    padded.view(torch.uint8)[: m.q.shape[0]].copy_(m.q.view(torch.uint8))
    return Scaled(padded, m.inverse)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, emulated: bool) -> torch.Tensor:
    """As F.linear, in fp8; the result is bf16."""
    if not x.numel():  # which has no largest number
        return torch.nn.functional.linear(x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16())
    out = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, emulated)  # type: ignore[no-untyped-call]
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def convert(model: torch.nn.Module, *, emulated: bool = False) -> int:
    """Have the model's linear layers compute in fp8 where their dimensions allow it; how many do.

    They stay what they are, nn.Linear and the same parameters; a layer of a class of its own is left alone.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, _InFp8):
            count += 1
        elif type(module) is torch.nn.Linear and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
            module.__class__ = _Emulated if emulated else Linear
            count += 1
    return count


class _InFp8:
    """Mark of the layers below."""


class Linear(torch.nn.Linear, _InFp8):
    """A linear layer whose products are in fp8, where autocast is on."""

    _emulated = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_autocast_enabled(x.device.type):  # outside of the model's own forward
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return linear(x, self.weight, self.bias, emulated=self._emulated)


class _Emulated(Linear):
    _emulated = True


def check_device(device: torch.device) -> None:
    """ConfigError where the device has no fp8."""
    where = f"this run computes on {device}"
    if device.type == "cuda":
        if torch.version.cuda and torch.cuda.get_device_capability(device) >= _CAPABILITY:
            return
        where = f"{device} is a {torch.cuda.get_device_name(device)}"
    raise ConfigError(
        "precision fp8 needs an NVIDIA GPU of compute capability 8.9 or later (Ada: RTX 40, L4, L40S; Hopper: H100, "
        f"H200; Blackwell), and {where}. Use bf16"
    )
