"""Forms of a model: each computes what the model does, in batches as alone, and follows weights that are swapped in."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.serve import forms
from paceline.serve.batcher import Batcher, Job
from paceline.serve.choice import Choice, choose
from paceline.serve.engine import Engine
from paceline.serve.fields import Field
from paceline.serve.refused import Refused
from paceline.serve.settings import Settings

FIELDS = [Field("input", (1, 8, 8), torch.float32)]
COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 3)
    ).eval()


class Swapped:
    """Puts other tensors into the model when it is told to, as `Swap` does."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.number = model, 1

    def install(self) -> int:
        return self.number

    def change(self) -> None:
        self.number += 1
        for parameter in self.model.parameters():
            new = torch.empty_like(parameter).copy_(parameter)
            parameter.data = new * 1.5


@pytest.mark.parametrize("layout", ["as made", forms.CHANNELS_LAST])
@pytest.mark.parametrize(
    ("form", "precision", "tolerance"),
    [
        ("eager", "fp32", 1e-5),
        ("eager", "bf16", 3e-2),
        ("eager", "int8", 3e-2),
        pytest.param("export", "fp32", 1e-5, marks=pytest.mark.slow),
        pytest.param("compile", "fp32", 1e-5, marks=[pytest.mark.slow, COMPILER]),
    ],
)
def test_a_form_computes_what_the_model_does(form: str, precision: str, tolerance: float, layout: str) -> None:
    plain, model = net(), net()
    forward = forms.set_precision(model, precision)
    forms.lay_out(model, layout)
    swap = Swapped(model)
    chosen = forms.formed(form, forward, model, FIELDS, 6)
    engine = Engine(chosen, FIELDS, swap, 6, sizes=forms.sizes(form, 6))
    engine.warm()
    x = torch.rand(6, 1, 8, 8)
    for number in (1, 2):
        expected = plain(x).detach().numpy()
        batched, version = engine.run([(x[:1].numpy(),), (x[1:5].numpy(),), (x[5:].numpy(),)], [1, 4, 1])
        assert version == number
        together = np.concatenate([rows.arrays()[0] for rows in batched])
        alone = np.concatenate([engine.run([(x[i : i + 1].numpy(),)], [1])[0][0].arrays()[0] for i in range(6)])
        np.testing.assert_allclose(together, expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(alone, together, rtol=tolerance, atol=tolerance)
        swap.change()
        for parameter in plain.parameters():
            parameter.data = parameter.data * 1.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("form", ["eager", "export", pytest.param("compile", marks=COMPILER)])
def test_a_gpu_computes_what_the_model_does(form: str, tmp_path: Path) -> None:
    plain, model = net(), net().cuda()
    swap = Swapped(model)
    settings = Settings(model="x", max_batch_size=4, device="cuda")
    assert "of 2 threads" not in choose(settings, 2, model, model, FIELDS, tmp_path).said
    chosen = forms.formed(form, model, model, FIELDS, 4)
    engine = Engine(chosen, FIELDS, swap, 4, device=torch.device("cuda"), sizes=forms.sizes(form, 4))
    engine.warm()
    x = torch.rand(3, 1, 8, 8)
    for _ in range(2):
        rows = engine.run([(x.numpy(),)], [3])[0][0]
        np.testing.assert_allclose(rows.arrays()[0], plain(x).detach().numpy(), rtol=1e-3, atol=1e-3)
        swap.change()
        for parameter in plain.parameters():
            parameter.data = parameter.data * 1.5


def test_int8_wants_linear_layers() -> None:
    with pytest.raises(ConfigError, match="int8"):
        forms.set_precision(nn.Sequential(nn.Conv2d(1, 1, 3)), "int8")


def test_the_first_measures_and_the_others_take_it_over(tmp_path: Path) -> None:
    model = net()
    settings = Settings(model="x", max_batch_size=4)
    first = choose(settings, 2, model, model, FIELDS, tmp_path)
    assert first.form == "eager"
    assert first.threads in (1, 2)
    assert "channels last" in first.said
    (tmp_path / "choice.json").write_text('{"threads": 1, "layout": "channels last", "form": "export", "said": "so"}')
    second = choose(settings, 2, model, model, FIELDS, tmp_path)
    assert second == Choice(threads=1, layout=forms.CHANNELS_LAST, form="export", said="so")
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_model_that_fails_on_values_refuses_them() -> None:
    table = nn.Embedding(3, 2)
    engine = Engine(table, [Field("input", (1,), torch.int64)], Swapped(table), 4)
    engine.warm()
    with pytest.raises(Refused, match="index out of range") as refused:
        engine.run([(np.array([[9]]),)], [1])
    assert refused.value.status == 422


class Fussy(nn.Module):
    """Fails in several ways, as its values say."""

    def forward(self, x: torch.Tensor) -> Any:
        assert not (x == 1).any(), "one"
        if (x == 2).any():
            raise KeyError("two")
        if (x == 3).any():
            raise TypeError("three")
        if (x == 4).any():
            return x[:1]
        if (x == 5).any():
            return x[:, :1]
        if (x == 6).any():
            return x.double()
        if (x == 7).any():
            return {"other": x}
        return torch.cat([x, x]) if (x == 8).any() else x


@pytest.mark.parametrize("value", range(1, 9))
def test_values_spoil_no_rows_of_others(value: int) -> None:
    """Whatever a model does with a request's values, those who were computed with it get their own rows."""
    engine = Engine(Fussy(), [Field("x", (2,), torch.float32)], Swapped(net()), 8, sizes=[4, 8])
    engine.warm()
    before, bad, after = (np.full((2, 2), each, np.float32) for each in (-1, value, -2))

    async def go() -> list[Any]:
        batcher, told = Batcher(engine.run, max_batch_size=8), list[Any]()
        for array in (before, bad, after):
            batcher.submit(Job((array,), 2, lambda rows, version: told.append(rows.arrays()[0]), told.append))
        await asyncio.wait_for(batcher.drained(), 60)
        return told

    first, refused, last = asyncio.run(go())
    np.testing.assert_array_equal(first, before)
    np.testing.assert_array_equal(last, after)
    assert (isinstance(refused, Refused), refused.status) == (True, 422)


def test_what_a_request_has_left_in_the_buffers_is_not_computed_again() -> None:
    engine = Engine(Fussy(), [Field("x", (2,), torch.float32)], Swapped(net()), 8, sizes=[8])
    engine.warm()
    with pytest.raises(Refused):
        engine.run([(np.ones((8, 2), np.float32),)], [8])
    engine.run([(np.zeros((1, 2), np.float32),)], [1])


def test_outputs_must_count_items() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    with pytest.raises(ConfigError, match="first dimension counts items"):
        Engine(Mean(), FIELDS, Swapped(net()), 4).warm()


def test_outputs_must_be_of_types_that_answers_hold() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x)

    with pytest.raises(ConfigError, match="the model makes 'outputs' with elements of complex64"):
        Engine(Spectrum(), FIELDS, Swapped(net()), 4).warm()
