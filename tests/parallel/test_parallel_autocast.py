"""Forward passes under autocast: what comes out, what stays as it was, and models of all sorts."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.core.errors import ConfigError
from paceline.parallel.nested import each

Join = Callable[..., Any]
Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Found:
    logits: torch.Tensor
    count: int


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, fail: bool = False) -> Any:
        hidden = self.first(x)
        self.seen.append(hidden.dtype)
        if fail:
            raise ArithmeticError
        out = self.second(hidden.relu())
        return Found(out, 1), {"hidden": [hidden, x]}, Pair(out, None)


def sgd(run: Any, model: nn.Module, **options: Any) -> Any:
    return run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, **options), model)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_model_computes_in_half_precision_and_gives_float32(join: Join, precision: str, dtype: torch.dtype) -> None:
    run, model = join(precision), Net()
    keys = list(model.state_dict())
    sgd(run, model)
    found, nested, pair = model(torch.randn(4, 8))
    assert model.seen == [dtype]
    assert found.logits.dtype == nested["hidden"][0].dtype == pair.a.dtype == torch.float32
    assert found.count == 1
    assert pair.b is None
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert list(model.state_dict()) == keys
    assert isinstance(model, Net)


def test_fp32_leaves_the_model_alone(join: Join) -> None:
    run, model = join("fp32"), Net()
    sgd(run, model)
    assert type(model) is Net
    with run.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_a_failing_pass_and_a_model_within_itself_leave_autocast_as_it_was(join: Join) -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor, depth: int = 1) -> Any:  # type: ignore[override]
            if depth:
                assert self(x, 0)[2].a.dtype == torch.float32
            return super().forward(x)

    for precision in "bf16", "fp16":
        run, model, twice = join(precision, precision), Net(), Twice()
        sgd(run, model)
        sgd(run, twice)
        parameters = dict(model.named_parameters())
        with pytest.raises(ArithmeticError):
            model(torch.randn(4, 8), fail=True)
        assert not torch.is_autocast_enabled("cpu")
        assert all(parameters[name] is p for name, p in model.named_parameters())
        twice(torch.randn(4, 8))[2].a.sum().backward()
        assert all(isinstance(p, nn.Parameter) and p.grad is not None for p in twice.parameters())


def test_evaluation_and_parts_outside_of_the_model_have_the_precision_too(join: Join) -> None:
    run, model = join("bf16"), Net()
    sgd(run, model)

    def measure(x: torch.Tensor) -> dict[str, torch.Tensor]:
        with run.autocast():
            assert (x @ x.T).dtype == torch.bfloat16
        return {"mean": model(x)[2].a.mean()}

    run.evaluate(measure, TensorDataset(torch.randn(6, 8)))
    assert model.seen[-1] == torch.bfloat16


def test_a_copy_computes_alike_with_its_own_weights_and_a_pickle_is_plain(join: Join) -> None:
    run, model = join("bf16"), nn.Sequential(nn.Linear(4, 4))
    sgd(run, model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
        twin[0].bias.fill_(0.3)
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), torch.full((2, 4), 0.3).bfloat16().float())
    assert not torch.equal(model(x), twin(x))
    back = pickle.loads(pickle.dumps(model))  # noqa: S301
    assert type(back) is nn.Sequential
    assert "_paceline_cast" not in vars(back)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("given", ["model", "compiled"])
def test_compiled_models_compute_the_same(join: Join, precision: str, given: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = copy.deepcopy(plain)
    compiled = torch.compile(model, backend="eager")
    x, y = torch.randn(4, 8), torch.randint(3, (4,))
    sgd(join(precision), plain)
    sgd(join(precision, "second"), model if given == "model" else compiled)
    for net in plain, compiled:
        F.cross_entropy(net(x), y).backward()
    for p, q in zip(plain.parameters(), model.parameters()):
        assert torch.equal(p.grad, q.grad)


def test_what_cannot_be_cast_is_refused(join: Join) -> None:
    run, model = join("bf16"), Net()
    model.forward = model.forward  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="forward was replaced"):
        sgd(run, model)


def test_what_does_not_change_stays_the_same_object() -> None:
    value = {"a": [torch.ones(1), (2, Found(torch.ones(1), 3))]}
    assert each(value, lambda t: t) is value
    changed = each(value, lambda t: t * 2)
    assert changed["a"][1][1] == Found(changed["a"][1][1].logits, 3)
    assert changed["a"][1][1].logits.item() == 2.0
