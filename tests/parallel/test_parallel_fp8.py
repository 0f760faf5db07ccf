"""Linear layers in fp8, rounded as a device would; and on one, where there is one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.core.errors import ConfigError
from paceline.parallel import fp8


def has_fp8() -> bool:
    try:
        fp8.check_device(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    except ConfigError:
        return False
    return True


SCALES = ("scale_a", "scale_b")
DEVICES = [
    pytest.param("cpu", id="emulated"),
    pytest.param("cuda", marks=pytest.mark.skipif(not has_fp8(), reason="no device with fp8")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [(16,), (5, 3), (37,)])
def test_products_and_gradients_are_those_of_float32_within_fp8s_steps(device: str, rows: tuple[int, ...]) -> None:
    """e4m3 has a relative step of 1/16, e5m2 of 1/8; sums of many roundings are nearer than that."""
    torch.manual_seed(0)
    x = torch.randn(*rows, 32, device=device, requires_grad=True)
    weight = (torch.randn(48, 32, device=device) / 6).requires_grad_()
    bias = torch.randn(48, device=device, requires_grad=True)
    twins = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    out = fp8.linear(x, weight, bias, emulated=device == "cpu")
    plain = F.linear(*twins)
    assert out.dtype == torch.bfloat16
    assert out.shape == plain.shape
    towards = torch.randn_like(plain) * 1e-4  # far below what fp8 could say without a scale
    out.float().backward(towards)
    plain.backward(towards)
    pairs = [(out.float(), plain), *((t.grad, twin.grad) for t, twin in zip((x, weight, bias), twins))]
    for mine, right in pairs:
        assert mine is not None
        assert right is not None
        assert (mine.float() - right).norm() < 0.08 * right.norm()
        assert not torch.equal(mine.float(), right)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("rows", [16, 37])
def test_the_emulation_is_what_torchs_product_gives(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where torch has it too, and with the shapes and layouts that a GPU insists on."""
    product, calls = torch._scaled_mm, []

    def checked(left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        assert left.is_contiguous()
        assert right.t().is_contiguous()
        assert not left.shape[1] % 16
        assert not right.shape[0] % 16
        assert not right.shape[1] % 16
        assert {left.dtype, right.dtype} != {torch.float8_e5m2}
        assert all(options[name].dtype == torch.float32 and options[name].numel() == 1 for name in SCALES)
        calls.append((left.dtype, options["out_dtype"]))
        return product(left, right, **options)

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    results = []
    for emulated in True, False:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, 32, generator=generator).requires_grad_()
        weight = torch.randn(48, 32, generator=generator).requires_grad_()
        out = fp8.linear(x, weight, None, emulated=emulated)
        out.float().square().sum().backward()
        results.append([out.float(), x.grad, weight.grad])
    forward, backward = (fp8.FORWARD, torch.bfloat16), (fp8.BACKWARD, torch.bfloat16)
    assert calls == [forward, backward, (fp8.BACKWARD, torch.float32)]
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs, rtol=0.01, atol=0.01)


def test_rounding_is_that_of_the_formats() -> None:
    x = torch.tensor([[448.0, 17.0, 0.0, -1.06]])
    q, inverse = fp8.scaled(x, fp8.FORWARD)
    assert torch.equal(q.float() * inverse, torch.tensor([[448.0, 16.0, 0.0, -1.0]]))
    q, inverse = fp8.scaled(torch.zeros(2, 2), fp8.BACKWARD)
    assert torch.equal(q.float() * inverse, torch.zeros(2, 2))
    q, inverse = fp8.scaled(torch.tensor([[1.0, torch.inf]]), fp8.BACKWARD)
    assert not torch.isfinite(q.float() * inverse).all()


def test_layers_are_chosen_by_their_dimensions_and_stay_linear() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10), nn.Linear(64, 16).double())
    keys, parameters = list(model.state_dict()), list(model.parameters())
    assert fp8.convert(model, emulated=True) == 2
    assert fp8.convert(model, emulated=True) == 2
    assert [isinstance(m, fp8.Linear) for m in model] == [True, False, False, True]
    assert isinstance(model[0], nn.Linear)
    assert list(model.state_dict()) == keys
    assert all(p is q for p, q in zip(parameters, model.parameters()))


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_in_fp8_learns_what_one_in_float32_learns(device: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    model = copy.deepcopy(plain)
    fp8.convert(model, emulated=device == "cpu")
    x, y = torch.randn(64, 16, device=device), torch.randint(4, (64,), device=device)
    losses = []
    for each in model, plain:
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for _ in range(40):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                out = each(x)
            loss = F.cross_entropy(out.float(), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 0.2
    assert abs(losses[0] - losses[1]) < 0.1
