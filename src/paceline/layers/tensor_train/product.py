"""x Wᵀ from the cores of W, by a plan that says in which order they are contracted (`order.py`).

What is computed on its way lies as (batch, a1, a2, …, ad): ak is nk before core k is contracted and mk after, and the
open rank between a contracted core and one that is not stands between their two modes. So the modes and ranks that a
step sums over are always neighbours in memory, and so are those that it makes: with P, C and Q for what comes before,
what is summed over and what comes after, each step is

    z (P, C, Q) → out (P, R, Q),   out[p] = A z[p]

for one small matrix A made of the cores. Nothing but A is ever transposed.

What lies between two steps is up to `rank` times the size of x. So a large batch is done in blocks of rows, each of
which stays within the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.layers.tensor_train.order import Plan, Step
from paceline.layers.tensor_train.svd import compose, join

_WORTH_A_CALL = 1 << 16  # multiplications of one product, above which a call for each costs less than copies


def product(x: Tensor, cores: Sequence[Tensor], plan: Plan) -> Tensor:
    """(rows, ∏ n) → (rows, ∏ m)."""
    if plan.dense:
        return torch.nn.functional.linear(x, compose(list(cores)))
    matrices = [_matrix(step, cores) for step in plan.steps]
    learns = torch.is_grad_enabled() and (x.requires_grad or any(core.requires_grad for core in cores))
    times: Callable[[Tensor, Tensor], Tensor] = Times.apply if learns else _times
    if x.shape[0] <= plan.block:
        return _chain(x, matrices, plan, times)
    if learns:
        return torch.cat([_chain(block, matrices, plan, times) for block in torch.split(x, plan.block)])
    out = x.new_empty(x.shape[0], plan.shape.rows)
    for into, block in zip(torch.split(out, plan.block), torch.split(x, plan.block)):
        into.copy_(_chain(block, matrices, plan, times))
    return out


def _chain(x: Tensor, matrices: list[Tensor], plan: Plan, times: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    rows = x.shape[0]
    for step, matrix in zip(plan.steps, matrices):
        x = times(matrix, x.reshape(rows * step.before, step.summed, step.after))
    return x.reshape(rows, -1)


def _matrix(step: Step, cores: Sequence[Tensor]) -> Tensor:
    """A (R, C): ranks that are open already are summed over, the others are made."""
    core = cores[step.first]
    for k in range(step.first + 1, step.last + 1):
        core = join(core, cores[k])
    made = [axis for axis, here in ((0, not step.open_left), (1, True), (3, not step.open_right)) if here]
    summed = [axis for axis, here in ((0, step.open_left), (2, True), (3, step.open_right)) if here]
    return core.permute(*made, *summed).reshape(step.made, step.summed)


def _times(matrix: Tensor, z: Tensor) -> Tensor:
    """out[p] = A z[p], by the one call of BLAS that needs no copy."""
    p, c, q = z.shape
    r = matrix.shape[0]
    if q == 1:
        return torch.mm(z.reshape(p, c), matrix.t()).view(p, r, 1)
    if p == 1:
        return torch.mm(matrix, z.reshape(c, q)).view(1, r, q)
    return torch.bmm(matrix.expand(p, r, c), z)


class Times(torch.autograd.Function):
    """out[p] = A z[p]. Autograd's own way would keep a gradient of A for each p before it adds them up."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(matrix, z)
        return _times(matrix, z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        matrix, z = ctx.saved_tensors
        grad = grad.contiguous()
        of_z = Times.apply(matrix.t(), grad) if ctx.needs_input_grad[1] else None  # type: ignore[no-untyped-call]
        return (_of_matrix(grad, z) if ctx.needs_input_grad[0] else None), of_z


def _of_matrix(grad: Tensor, z: Tensor) -> Tensor:
    """Σ_p grad[p] z[p]ᵀ."""
    p, c, q = z.shape
    r = grad.shape[1]
    if q == 1:
        return grad.reshape(p, r).t() @ z.reshape(p, c)
    if r * c * q < _WORTH_A_CALL:
        return grad.transpose(0, 1).reshape(r, p * q) @ z.transpose(0, 1).reshape(c, p * q).t()
    return torch.addbmm(grad.new_zeros(()), grad, z.transpose(1, 2), beta=0)
