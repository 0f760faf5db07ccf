"""DANA: with one worker it is Nesterov's momentum; the sum of momenta stays the sum."""

from __future__ import annotations

import pytest
import torch

from paceline.staleness import Dana, Push


def push(worker: int) -> Push:
    return Push(worker=worker, age=0, lr=0.1)


def total(dana: Dana) -> torch.Tensor:
    """The sum, as seen in what is sent at a learning rate of 1 for weights of 0."""
    return dana.on_pull("w", torch.zeros(4, dtype=torch.float64), 0, 1.0) / -dana.momentum


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
def test_one_worker_reads_the_parameters_of_nesterov_sgd(momentum: float) -> None:
    """torch's p is w − lr · γ · v: p − lr · (g + γ · v′) = w − lr · v′ − lr · γ · v′, where v′ = γ · v + g."""
    torch.manual_seed(0)
    matrix = torch.randn(6, 6, dtype=torch.float64)
    dana, w = Dana(momentum), torch.randn(6, dtype=torch.float64)
    parameter = w.clone().requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=momentum, nesterov=True)
    for _ in range(60):
        read = dana.on_pull("w", w, 0, 0.01)
        torch.testing.assert_close(read, parameter.detach(), rtol=1e-10, atol=1e-10)
        w.sub_(dana.on_push("w", matrix.T @ torch.tanh(matrix @ read), w, push(0)), alpha=0.01)
        parameter.grad = matrix.T @ torch.tanh(matrix @ parameter.detach())
        optimizer.step()
    assert not torch.allclose(w, parameter.detach(), rtol=1e-3)  # the weights themselves are somewhere else


def test_each_worker_has_a_momentum_of_its_own_and_so_has_each_piece() -> None:
    dana, weights, one = Dana(0.5), torch.zeros(4), torch.ones(4)
    applied = [float(dana.on_push("w", one.clone(), weights, push(worker))[0]) for worker in (0, 0, 1, 0, 1)]
    assert applied == [1, 1.5, 1, 1.75, 1.5]
    assert float(dana.on_push("u", one.clone(), weights, push(0))[0]) == 1
    assert total(dana).tolist() == [3.25] * 4


def test_a_worker_that_leaves_takes_its_momentum_out_of_the_sum() -> None:
    dana, weights = Dana(0.5), torch.zeros(4)
    for worker, size in (0, 1e-3), (1, 1e8), (2, 3e-3):
        dana.on_push("w", torch.full((4,), size), weights, push(worker))
    dana.forget(1)  # subtracting 1e8 would leave a rounding of 8 behind
    torch.testing.assert_close(total(dana), torch.full((4,), 4e-3, dtype=torch.float64), rtol=1e-6, atol=0)
    dana.forget(0)
    dana.forget(2)
    assert dana.on_pull("w", weights, 0, 1.0) is weights
    assert float(dana.on_push("w", torch.ones(4), weights, push(1))[0]) == 1


def test_roundings_do_not_gather_in_the_sum() -> None:
    """A push of 1e8 drives small ones out of the sum; at the 256th push it is added up anew."""
    dana, weights = Dana(0.5), torch.zeros(4)
    dana.on_push("w", torch.full((4,), 1e-3), weights, push(0))
    dana.on_push("w", torch.full((4,), 1e8), weights, push(1))
    for _ in range(253):
        dana.on_push("w", torch.zeros(4), weights, push(1))
    assert total(dana).tolist() != pytest.approx([1e-3] * 4)
    dana.on_push("w", torch.zeros(4), weights, push(1))
    assert total(dana).tolist() == pytest.approx([1e-3] * 4)


def test_the_sum_does_not_depend_on_the_order_in_which_workers_came_or_were_saved() -> None:
    dana, weights, again = Dana(0.5), torch.zeros(4), Dana(0.5)
    for worker, size in (0, 1e8), (2, -1e8), (1, 1.0), (3, 1.0):
        dana.on_push("w", torch.full((4,), size), weights, push(worker))
    state = dana.state_dict()
    state["momenta"]["w"]["of"] = dict(sorted(state["momenta"]["w"]["of"].items()))
    again.load_state_dict(state)
    for one in dana, again:
        one.forget(3)  # has it added up anew
    assert total(dana).equal(total(again))


def test_momenta_of_bf16_gradients_keep_what_bf16_would_lose() -> None:
    dana, weights = Dana(0.5), torch.zeros(4, dtype=torch.bfloat16)
    dana.on_push("w", torch.full((4,), 256.0, dtype=torch.bfloat16), weights, push(0))
    for _ in range(10):  # in bf16, 128 + 0.25 is 128
        applied = dana.on_push("w", torch.full((4,), 0.25, dtype=torch.bfloat16), weights, push(0))
    exact = 256 * 0.5**10 + 0.25 * (1 - 0.5**10) / 0.5
    assert applied.dtype == torch.bfloat16
    assert total(dana).tolist() == pytest.approx([exact] * 4, rel=1e-6)
    assert dana.on_pull("w", weights, 0, 1.0).dtype == torch.bfloat16
