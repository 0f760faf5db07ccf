"""fp16: gradients that are scaled within the model and nowhere else, and steps that are skipped."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from paceline.core.errors import ConfigError
from paceline.parallel.scaling import Scaling, finite

Join = Callable[..., Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def pair(join: Join, words: str = "fp16", model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, nn.Module]:
    run, model = join(words), model or net()
    return run, run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, **options), model), model


def scaling(run: Any, optimizer: Any) -> Scaling:
    found = run._precise.scaling(optimizer)
    assert found is not None
    return found


def close(model: nn.Module, plain: nn.Module) -> None:
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.03, atol=0.003)


def test_gradients_that_fp16_would_lose_are_kept(join: Join) -> None:
    """Ten million times smaller than fp16's smallest number: what the model's own backward pass would make zeros."""
    _, _, model = pair(join)
    plain, x, y = net(), torch.randn(5, 6), torch.randint(3, (5,))
    for each in model, plain:
        (F.cross_entropy(each(x), y) * 1e-6).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.03, atol=1e-9)
        assert q.grad.abs().max() < 1e-6


def test_what_goes_around_the_model_is_not_scaled(join: Join) -> None:
    """A penalty on weights, a use of a weight outside of forward, a gradient with regard to the input, and two passes
    that are added up."""
    _, _, model = pair(join, "fp16(scale=4096)")
    plain = net()
    first, second = (torch.randn(5, 6) for _ in range(2))
    grads = []
    for each in model, plain:
        x = first.clone().requires_grad_()
        (each(x).square().mean() + 0.1 * sum(p.square().sum() for p in each.parameters())).backward()
        (F.linear(second, each[0].weight).square().mean() + each(second).mean()).backward()
        grads.append(x.grad)
    close(model, plain)
    torch.testing.assert_close(*grads, rtol=0.03, atol=0.003)


def test_a_model_behind_a_model_is_scaled_once(join: Join) -> None:
    run, first = join("fp16"), net()
    second = nn.Linear(3, 1)
    plain_first, plain_second = copy.deepcopy(first), copy.deepcopy(second)
    for each in first, second:
        run.optimizer(torch.optim.SGD(each.parameters(), lr=0.1), each)
    x = torch.randn(5, 6)
    second(first(x)).square().mean().backward()
    plain_second(plain_first(x)).square().mean().backward()
    close(first, plain_first)
    close(second, plain_second)


class Whole(nn.Module):
    """Has a model of its own within, and calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = net(), nn.Linear(3, 3)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(3) + 0.1)
            self.head.bias.zero_()

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out + self(x * 0.5, 0) if depth else out


def test_a_model_within_a_model_is_scaled_once(join: Join) -> None:
    run, model, plain = join("fp16(scale=1024)"), Whole(), Whole()
    body = run.optimizer(torch.optim.SGD(model.body.parameters(), lr=0.1), model)
    head = run.optimizer(torch.optim.SGD(model.head.parameters(), lr=0.1), model.head)
    x = torch.randn(5, 6)
    for each in model, plain:
        each(x).square().mean().backward()
    close(model, plain)
    model.zero_grad()
    (model.head(torch.ones(1, 3)) * 1e9).sum().backward()  # by itself
    head.step()
    assert (scaling(run, head).scale, scaling(run, body).scale) == (512.0, 1024.0)
    model.zero_grad()
    (model(x) * 1e9).sum().backward()
    head.step()
    body.step()
    assert scaling(run, body).scale == 512.0


def test_what_the_scale_cannot_see_is_refused(join: Join) -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: torch.Tensor) -> Any:
            return torch.distributions.Normal(self.body(x), 1.0)

    _, _, model = pair(join, model=Hides())
    with pytest.raises(ConfigError, match="through none of its outputs"):
        model(torch.randn(5, 6)).mean.sum().backward()
    _, _, model = pair(join)
    x = torch.randn(5, 6, requires_grad=True)
    with pytest.raises(ConfigError, match="gradients of gradients"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_outputs_may_be_changed_in_place(join: Join) -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: torch.Tensor) -> Any:
            out = self.body(x)
            return out, out.float().softmax(1)

    _, _, model = pair(join, "fp16(scale=1024)", Same())
    plain, x = Same(), torch.randn(5, 6)
    for each in model, plain:
        logits, likely = each(x)
        logits /= 2.0
        likely = likely.clone() if each is plain else likely  # which softmax itself needs
        likely[:, 0] = 1.0
        (logits.square().mean() + likely.square().sum()).backward()
    close(model, plain)


def test_steps_skipped_again_and_again_are_told_once(join: Join) -> None:
    run, optimizer, model = pair(join)
    for _ in range(25):
        optimizer.zero_grad()
        (model(torch.randn(5, 6)).mean() * torch.inf).backward()
        optimizer.step()
    run.close()
    events = [json.loads(line) for line in (run.dir / "events" / "rank-0.jsonl").read_text().splitlines()]
    told = [e["line"] for e in events if e["kind"] == "told"]
    assert len(told) == 1
    assert "the last 20 steps were skipped" in told[0]
    assert sum(e["kind"] == "skipped" for e in events) == 25


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.rnn = nn.Embedding(7, 6), nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.head(self.rnn(self.embed(x))[0])
        return out + F.linear(self.embed(x), self.embed.weight)


def test_shared_weights_and_recurrent_layers(join: Join) -> None:
    _, optimizer, model = pair(join, "fp16(scale=256)", Tied())
    plain, x = Tied(), torch.randint(7, (4, 5))
    for _ in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        for each in model, plain:
            each(x).square().mean().backward()
        close(model, plain)


class Segments(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = net(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def test_segments_computed_again_are_right_or_refused(join: Join) -> None:
    x = torch.randn(5, 6)
    _, _, model = pair(join, model=Segments(False))
    plain = net()
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    close(model, plain)
    _, _, model = pair(join, model=Segments(True))
    with pytest.raises(ConfigError, match="use_reentrant=False"):
        model(x.requires_grad_()).square().mean().backward()


def test_an_overflow_skips_the_step_and_halves_the_scale(join: Join) -> None:
    run, optimizer, model = pair(join, "fp16(scale=1024, every=3)", momentum=0.9)
    x, scale = torch.randn(5, 6), scaling(run, optimizer)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        (model(x).square().mean() * factor).backward()
        optimizer.step()

    step(1.0)
    before = [p.clone() for p in model.parameters()]
    step(1e9)
    assert all(map(torch.equal, model.parameters(), before))
    assert (scale.scale, scale.skipped, scale.good) == (512.0, 1, 0)
    for _ in range(3):
        step(1.0)
    assert (scale.scale, scale.skipped, scale.good) == (1024.0, 1, 0)
    assert not all(map(torch.equal, model.parameters(), before))
    assert run._totals()["skipped_steps"] == 1
    run.close()
    events = [json.loads(line) for line in (run.dir / "events" / "rank-0.jsonl").read_text().splitlines()]
    assert [(e["step"], e["scale"]) for e in events if e["kind"] == "skipped"] == [(2, 512.0)]


def test_several_optimizers_of_a_model_change_its_scale_once_a_pass(join: Join) -> None:
    run, model = join("fp16(scale=64)"), net()
    both = [run.optimizer(torch.optim.SGD(part.parameters(), lr=0.1), model) for part in (model[0], model[2])]
    (model(torch.randn(5, 6)).sum() * 1e12).backward()
    for optimizer in both:
        optimizer.step()
    assert scaling(run, both[0]) is scaling(run, both[1])
    assert (scaling(run, both[0]).scale, scaling(run, both[0]).skipped) == (32.0, 1)


@pytest.mark.parametrize("precision", ["fp16(scale=1024)", "bf16(weights)"])
def test_threads_of_a_member_compute_alike(join: Join, precision: str) -> None:
    run, model, seen = join(precision), net(), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = run.loader(TensorDataset(torch.randn(64, 6), torch.randint(3, (64,))), batch_size=8)

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def step() -> None:
        norms.append(max(p.grad.abs().max().item() for p in model.parameters()))
        optimizer.step()

    norms: list[float] = []
    before = [value.clone() for value in model.state_dict().values()]
    for _ in run.epochs(1):
        run.in_threads(2, loss_of, model, optimizer, loader, step)
    assert set(seen) == {torch.float16 if "fp16" in precision else torch.bfloat16}
    assert len(norms) == 8
    assert 0 < max(norms) < 2.0
    assert not any(map(torch.equal, model.state_dict().values(), before))


def test_accumulated_passes_are_judged_together(join: Join) -> None:
    run, optimizer, model = pair(join, "fp16(scale=1024)")
    before = [p.clone() for p in model.parameters()]
    with run.accumulate():
        (model(torch.randn(5, 6)).mean() * 1e9).backward()
    model(torch.randn(5, 6)).mean().backward()
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    assert scaling(run, optimizer).scale == 512.0


def test_a_scaler_of_the_scripts_own_is_refused_unless_it_rests(join: Join) -> None:
    _, optimizer, model = pair(join, "fp16(scale=2)")
    for enabled in False, True:
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=2.0)
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(5, 6)).mean()).backward()
        if enabled:
            with pytest.raises(ConfigError, match="Take the scaler out"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)


def test_the_scale_is_in_the_checkpoint(join: Join) -> None:
    run, optimizer, model = pair(join, "fp16(scale=1024)")
    for _ in run.epochs(1):
        (model(torch.randn(5, 6)).mean() * 1e9).backward()
        optimizer.step()
    run.close()
    run, optimizer, model = pair(join, "fp16(scale=1024)")
    for _ in run.epochs(2):
        assert (scaling(run, optimizer).scale, scaling(run, optimizer).skipped) == (512.0, 1)


def test_finite_sees_every_kind_of_gradient() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (2,), check_invariants=True)
    assert finite([torch.ones(3), None, torch.empty(0), torch.ones(2, dtype=torch.bfloat16)])
    for bad in torch.tensor([1.0, torch.nan]), torch.tensor([-torch.inf]).bfloat16(), sparse:
        assert not finite([torch.ones(3), bad])
