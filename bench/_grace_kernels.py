"""Convolution and batch norm of many copies of a network at once, as Triton kernels, for `bench.grace` on a GPU.

Copies have weights, statistics and gradients of their own; activations are [copy, image, height, width, channel]. What
libraries have for that (grouped convolutions, or windows written out and batched products) moves several times the
bytes. `_grace_model.conv_norm` is the same in plain torch.
"""

# mypy: ignore-errors
# ruff: noqa: N803, E741
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _find(p, per_image, width, height_in, width_in, down, right, STRIDE: tl.constexpr, BACK: tl.constexpr):
    """Which pixels of the input meet tap (down, right) at the output pixels `p`, and which of them there are."""
    image, rest = p // per_image, p % per_image
    row, column = rest // width, rest % width
    if BACK:
        row, column = row + 1 - down, column + 1 - right
        there = (row >= 0) & (column >= 0) & (row % STRIDE == 0) & (column % STRIDE == 0)
        row, column = row // STRIDE, column // STRIDE
    else:
        row, column = row * STRIDE + down - 1, column * STRIDE + right - 1
        there = (row >= 0) & (column >= 0)
    there = there & (row < height_in) & (column < width_in)
    return (image * height_in + row) * width_in + column, there


@triton.jit
def _convolve(
    x, w, y, part, num, num_in, per_image, width, height_in, width_in,
    C: tl.constexpr, O: tl.constexpr, STRIDE: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some pixels of y; BACK: of the gradient of the input. Forward, also their sums and sums of squares."""
    block, copy = tl.program_id(0), tl.program_id(1)
    x += copy * num_in * C
    w += copy * 9 * C * O
    p = block * BLOCK + tl.arange(0, BLOCK)
    c, o = tl.arange(0, C), tl.arange(0, O)
    acc = tl.zeros((BLOCK, O), tl.float32)
    for tap in tl.static_range(9):
        at, there = _find(p, per_image, width, height_in, width_in, tap // 3, tap % 3, STRIDE, BACK)
        values = tl.load(x + at[:, None] * C + c[None, :], mask=(there & (p < num))[:, None], other=0.0)
        if BACK:
            weights = tl.load(w + (tap * O + o[None, :]) * C + c[:, None])
        else:
            weights = tl.load(w + (tap * C + c[:, None]) * O + o[None, :])
        acc = tl.dot(values, weights, acc)
    place = y + copy * num * O + p[:, None] * O + o[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), mask=(p < num)[:, None])
    if not BACK:
        part += (copy * tl.num_programs(0) + block) * 2 * O
        tl.store(part + o, tl.sum(acc, 0))
        tl.store(part + O + o, tl.sum(acc * acc, 0))


@triton.jit
def _weights(
    x, dy, part, num, num_in, per_image, width, height_in, width_in, span,
    C: tl.constexpr, O: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of the weights of a row of three taps, from some of the pixels."""
    row, split, copy = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    x += copy * num_in * C
    dy += copy * num * O
    c, o = tl.arange(0, C), tl.arange(0, O)
    left = tl.zeros((C, O), tl.float32)
    middle = tl.zeros((C, O), tl.float32)
    right = tl.zeros((C, O), tl.float32)
    for start in range(split * span, (split + 1) * span, BLOCK):
        p = start + tl.arange(0, BLOCK)
        gradient = tl.load(dy + p[:, None] * O + o[None, :], mask=(p < num)[:, None], other=0.0)
        at, there = _find(p, per_image, width, height_in, width_in, row, 0, STRIDE, False)
        values = tl.load(x + at[:, None] * C + c[None, :], mask=(there & (p < num))[:, None], other=0.0)
        left = tl.dot(tl.trans(values), gradient, left)
        at, there = _find(p, per_image, width, height_in, width_in, row, 1, STRIDE, False)
        values = tl.load(x + at[:, None] * C + c[None, :], mask=(there & (p < num))[:, None], other=0.0)
        middle = tl.dot(tl.trans(values), gradient, middle)
        at, there = _find(p, per_image, width, height_in, width_in, row, 2, STRIDE, False)
        values = tl.load(x + at[:, None] * C + c[None, :], mask=(there & (p < num))[:, None], other=0.0)
        right = tl.dot(tl.trans(values), gradient, right)
    part += ((split * tl.num_programs(2) + copy) * 9 + 3 * row) * C * O
    place = c[:, None] * O + o[None, :]
    tl.store(part + place, left)
    tl.store(part + C * O + place, middle)
    tl.store(part + 2 * C * O + place, right)


@triton.jit
def _moments(part, running, out, num_parts, num, C: tl.constexpr, ROWS: tl.constexpr):
    """Mean and 1 / deviation of each channel; the running mean and variance follow."""
    copy = tl.program_id(0)
    c, r = tl.arange(0, C), tl.arange(0, ROWS)
    total, squares = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for start in range(0, num_parts, ROWS):
        row = (copy * num_parts + start + r) * 2
        there = (start + r < num_parts)[:, None]
        total += tl.sum(tl.load(part + row[:, None] * C + c[None, :], mask=there, other=0.0), 0)
        squares += tl.sum(tl.load(part + (row[:, None] + 1) * C + c[None, :], mask=there, other=0.0), 0)
    mean = total / num
    variance = tl.maximum(squares / num - mean * mean, 0.0)
    place = copy * 2 * C + c
    tl.store(out + place, mean)
    tl.store(out + place + C, 1.0 / tl.sqrt(variance + 1e-5))
    tl.store(running + place, 0.9 * tl.load(running + place) + 0.1 * mean)
    tl.store(running + place + C, 0.9 * tl.load(running + place + C) + 0.1 * variance * num / (num - 1))


@triton.jit
def _norm(
    x, shortcut, moments, gamma, beta, y, numel, C: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y = max(0, gamma * normalised x + beta + shortcut)."""
    copy = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, there = i % C, i < numel
    mean, inverse = tl.load(moments + copy * 2 * C + c), tl.load(moments + copy * 2 * C + C + c)
    value = (tl.load(x + copy * numel + i, mask=there, other=0.0).to(tl.float32) - mean) * inverse
    value = value * tl.load(gamma + copy * C + c) + tl.load(beta + copy * C + c)
    if ADDS:
        value += tl.load(shortcut + copy * numel + i, mask=there, other=0.0).to(tl.float32)
    tl.store(y + copy * numel + i, tl.maximum(value, 0.0).to(y.dtype.element_ty), mask=there)


@triton.jit
def _norm_sums(dy, y, x, moments, part, num, span, C: tl.constexpr, BLOCK: tl.constexpr):
    """The gradients of beta and gamma, from some of the pixels."""
    split, copy = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, C)
    mean, inverse = tl.load(moments + copy * 2 * C + c), tl.load(moments + copy * 2 * C + C + c)
    first, second = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for start in range(split * span, (split + 1) * span, BLOCK):
        p = start + tl.arange(0, BLOCK)
        place, there = (copy * num + p[:, None]) * C + c[None, :], (p < num)[:, None]
        lit = tl.load(y + place, mask=there, other=0.0).to(tl.float32) > 0
        gradient = tl.where(lit, tl.load(dy + place, mask=there, other=0.0).to(tl.float32), 0.0)
        normal = (tl.load(x + place, mask=there, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        first += tl.sum(gradient, 0)
        second += tl.sum(gradient * normal, 0)
    part += (copy * tl.num_programs(0) + split) * 2 * C
    tl.store(part + c, first)
    tl.store(part + C + c, second)


@triton.jit
def _norm_back(
    dy, y, x, moments, gamma, sums, dx, dshortcut, num, numel, C: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The gradients of x and of the shortcut."""
    copy = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, there = i % C, i < numel
    place = copy * numel + i
    pair = copy * 2 * C + c
    mean, inverse = tl.load(moments + pair), tl.load(moments + pair + C)
    lit = tl.load(y + place, mask=there, other=0.0).to(tl.float32) > 0
    gradient = tl.where(lit, tl.load(dy + place, mask=there, other=0.0).to(tl.float32), 0.0)
    normal = (tl.load(x + place, mask=there, other=0.0).to(tl.float32) - mean) * inverse
    value = gradient - (tl.load(sums + pair) + normal * tl.load(sums + pair + C)) / num
    value *= tl.load(gamma + copy * C + c) * inverse
    tl.store(dx + place, value.to(dx.dtype.element_ty), mask=there)
    if ADDS:
        tl.store(dshortcut + place, gradient.to(dx.dtype.element_ty), mask=there)


class ConvNorm(torch.autograd.Function):
    """Convolution 3 x 3, batch norm, a shortcut where there is one, and the rectifier."""

    @staticmethod
    def forward(ctx, x, w, gamma, beta, shortcut, running, stride):
        copies, images, height_in, width_in, c = x.shape
        w = w.to(x.dtype).contiguous()
        o, height, width = w.shape[-1], height_in // stride, width_in // stride
        num, block = images * height * width, 64 if o == 64 else 128
        num_blocks = triton.cdiv(num, block)
        y = torch.empty(copies, images, height, width, o, dtype=x.dtype, device=x.device)
        part = torch.empty(copies, num_blocks, 2, o, device=x.device)
        _convolve[(num_blocks, copies)](
            x, w, y, part, num, images * height_in * width_in, height * width, width, height_in, width_in,
            C=c, O=o, STRIDE=stride, BACK=False, BLOCK=block, num_warps=4,
        )  # fmt: skip
        moments = torch.empty(copies, 2, o, device=x.device)
        _moments[(copies,)](part, running, moments, num_blocks, num, C=o, ROWS=64, num_warps=4)
        out = torch.empty_like(y)
        _norm[(triton.cdiv(num * o, 2048), copies)](
            y, y if shortcut is None else shortcut, moments, gamma, beta, out, num * o,
            C=o, ADDS=shortcut is not None, BLOCK=2048, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(x, w, gamma, y, out, moments)
        ctx.stride, ctx.adds = stride, shortcut is not None
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, w, gamma, y, out, moments = ctx.saved_tensors
        gradient = gradient.contiguous()
        copies, images, height_in, width_in, c = x.shape
        _, _, height, width, o = y.shape
        num, num_in, block = images * height * width, images * height_in * width_in, 4096 // o
        splits = max(1, min(32, num // 512))
        span = triton.cdiv(num, splits * block) * block
        part = torch.empty(copies, splits, 2, o, device=x.device)
        _norm_sums[(splits, copies)](gradient, out, y, moments, part, num, span, C=o, BLOCK=block, num_warps=4)
        sums = part.sum(1)
        dy, dshortcut = torch.empty_like(y), torch.empty_like(y) if ctx.adds else None
        _norm_back[(triton.cdiv(num * o, 2048), copies)](
            gradient, out, y, moments, gamma, sums, dy, dshortcut if ctx.adds else dy, num, num * o,
            C=o, ADDS=ctx.adds, BLOCK=2048, num_warps=8,
        )  # fmt: skip
        block = 64
        parts = torch.empty(splits, copies, 9, c, o, device=x.device)
        _weights[(3, splits, copies)](
            x, dy, parts, num, num_in, height * width, width, height_in, width_in, span,
            C=c, O=o, STRIDE=ctx.stride, BLOCK=block, num_warps=1 if o == 16 else 2 if o == 32 else 4,
        )  # fmt: skip
        dx = None
        if ctx.needs_input_grad[0]:
            dx, back = torch.empty_like(x), 64 if c == 64 else 128
            _convolve[(triton.cdiv(num_in, back), copies)](
                dy, w, dx, dx, num_in, num, height_in * width_in, width_in, height, width,
                C=o, O=c, STRIDE=ctx.stride, BACK=True, BLOCK=back, num_warps=4,
            )  # fmt: skip
        return dx, parts.sum(0), sums[:, 1], sums[:, 0], dshortcut, None, None


def conv_norm(x, w, gamma, beta, shortcut, running, stride):
    """The same as `_grace_model.conv_norm`; products are of numbers as exact as x is."""
    return ConvNorm.apply(x, w, gamma.contiguous(), beta.contiguous(), shortcut, running, stride)
