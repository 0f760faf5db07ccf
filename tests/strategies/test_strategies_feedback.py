"""What a codec leaves unsaid: nothing is lost and nothing counts twice, whatever becomes of a step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.strategies import AllReduce, World
from paceline.strategies.reducers import Coder, Method
from paceline.testing.together import together
from paceline.transport.group import Group

N = 4096


class Heads(nn.Module):
    """Two matrices whose gradients are whatever a test wants, and a parameter that is too small to be encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(64, N // 64)) for _ in range(2))
        self.few = nn.Parameter(torch.zeros(50))

    def backward(self, **gradients: torch.Tensor) -> None:
        terms = [(getattr(self, name) * g.view_as(getattr(self, name))).sum() for name, g in gradients.items()]
        torch.stack(terms).sum().backward()


class Rates(torch.optim.Optimizer):
    """Somebody's own: its groups have no "lr"."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"rate": lr})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


class Layered(torch.optim.SGD):
    """Made of SGD, and who knows what it does with a gradient."""


def coder_of(strategy: AllReduce) -> Coder:
    (engine,) = strategy._engines.values()
    assert engine.coder is not None
    return engine.coder


def noise(group: Group, step: int, name: str = "a") -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * step + 10 * group.rank + ord(name)))


# ---- learning rates


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 10.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda p: Layered(p, lr=0.1), 1.0),
        (lambda p: Rates(p, 0.1), 1.0),
        *((lambda p, k=kind: k(p, lr=0.1), 1.0) for kind in (torch.optim.Adam, torch.optim.RMSprop)),
        *((lambda p, k=kind: k(p, lr=0.1), 1.0) for kind in (torch.optim.Adagrad, torch.optim.Adadelta)),
        (lambda p: torch.optim.Adafactor(p, lr=0.1), 1.0),
    ],
    ids=["SGD", "momentum", "of SGD", "no lr", "Adam", "RMSprop", "Adagrad", "Adadelta", "Adafactor"],
)
def test_residuals_follow_the_rate_of_plain_sgd_only(make: Callable[..., torch.optim.Optimizer], most: float) -> None:
    """The rate falls to a hundredth: what is unsaid becomes ten times as much at most, and only where that is right."""

    def body(group: Group) -> float:
        model = Heads()
        optimizer, strategy = make(model.parameters()), AllReduce(codec="topk(0.01)")
        strategy.attach(model, optimizer, World(group))
        model.backward(a=noise(group, 0))
        before = coder_of(strategy).residuals["a"].clone()
        for rate in 0.05, 0.001, 0.0, 0.002:
            for g in optimizer.param_groups:
                g["lr" if "lr" in g else "rate"] = rate
            model.zero_grad()
            model.backward(a=torch.zeros(N))
        after = coder_of(strategy).residuals["a"]
        kept = after != 0
        assert float(kept.float().mean()) > 0.9
        factors = after[kept] / before[kept]
        assert torch.allclose(factors, factors[0].expand_as(factors))
        return float(factors[0])

    assert together(2, body, hosts=["a", "b"]) == pytest.approx([most, most])


def test_a_rate_that_rises_again_does_not_blow_up_momentum() -> None:
    def body(group: Group) -> list[float]:
        model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
        fixed = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=fixed) / 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 30)
        AllReduce(codec="topk(0.01)").attach(model, optimizer, World(group))
        target = torch.randn(32, 32, generator=fixed) / 6
        own, losses = torch.Generator().manual_seed(group.rank), []
        for _ in range(60):
            model.zero_grad()
            x = torch.randn(16, 32, generator=own)
            loss = (model(x) - x @ target).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(float(loss.detach()))
        return losses

    losses, _ = together(2, body, hosts=["a", "b"])
    assert max(losses[30:]) < losses[0]


# ---- steps that do not count

WAYS = [
    {"codec": "topk(0.05)"},
    {"codec": "sign"},
    {"codec": "sign", "feedback": True},
    {"codec": "quantize(2)"},
    {"codec": "quantize(8, shared=True)"},
    {"codec": "lowrank(1)"},
    {"codec": "sign", "back": "topk(0.1)"},
]
HOSTS = {"two hosts": ["a", "b"], "two members on each of two hosts": ["a", "a", "b", "b"]}


def missing(group: Group, strategy: AllReduce, model: Heads, given: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far what was applied at a rate of one and what is unsaid are from the mean of what was given to members."""
    coder, off = coder_of(strategy), {}
    for name, gradients in given.items():
        left = torch.zeros(N)
        if name in coder.residuals:
            left += coder.residuals[name][:N]
        for key, part in coder.returns.items():
            if key.startswith(f"{name}@"):
                start = int(key.rpartition("@")[2])
                left[start : start + part.numel()] += part
        group.all_reduce(left)
        mean = group.all_reduce(gradients.clone(), "mean")
        applied = -getattr(model, name).detach().reshape(-1)
        off[name] = float((mean - applied - left).norm() / mean.norm())
    return off


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_is_unsaid_waits_while_nobody_has_a_gradient(way: dict[str, Any], hosts: list[str]) -> None:
    """Two heads that are trained in turns: the one that rests gets no gradient, whatever was said of it."""

    def body(group: Group) -> tuple[dict[str, float], torch.Tensor]:
        model = Heads()
        strategy, optimizer = AllReduce(**way), torch.optim.SGD(model.parameters(), lr=1.0)
        strategy.attach(model, optimizer, World(group))
        given = {"a": torch.zeros(N), "b": torch.zeros(N)}
        for step in range(9):
            model.zero_grad()
            gradients = {name: noise(group, step, name) for name in ("ab" if step == 0 else "ab"[step % 2])}
            model.backward(**gradients, few=torch.ones(50))
            for name, g in gradients.items():
                given[name] += g
            optimizer.step()
        return missing(group, strategy, model, given), model.a.detach()

    first, *others = together(len(hosts), body, hosts=hosts)
    assert max(first[0].values()) < 1e-5
    assert all(torch.equal(first[1], other[1]) for other in others)


@pytest.mark.parametrize("back", [None, "topk(1.0)"])
def test_momentum_that_a_codec_keeps_waits_too(back: str | None) -> None:
    """As SGD leaves the momentum of a parameter without a gradient as it is."""

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        model = Heads()
        strategy, optimizer = AllReduce(codec="dgc(0.05)", back=back), torch.optim.SGD(model.parameters(), lr=1.0)
        strategy.attach(model, optimizer, World(group))
        kept = []
        for step in range(4):
            model.zero_grad()
            model.backward(b=noise(group, step, "b")) if step > 1 else model.backward(a=noise(group, step))
            optimizer.step()
            kept.append(coder_of(strategy).residuals["a"].clone())
        return kept[1], kept[3]

    for before, after in together(2, body, hosts=["a", "b"]):
        assert torch.equal(before, after)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_optimizer_that_steps_beside_one_that_skips_counts_once(way: dict[str, Any]) -> None:
    """One gradient overflows on one member: a GradScaler skips that parameter's optimizer, and no other."""

    def body(group: Group) -> tuple[float, bool]:
        model, scaler = Heads(), torch.amp.GradScaler("cpu", init_scale=1.0)
        strategy, world = AllReduce(bucket_mb=0.01, **way), World(group)
        optimizers = [torch.optim.SGD([p], lr=1.0) for p in (model.a, model.b)]
        for optimizer in optimizers:
            strategy.attach(model, optimizer, world)
        given = {"a": torch.zeros(N)}
        for step in range(6):
            model.zero_grad()
            a, b = noise(group, step), noise(group, step, "b")
            given["a"] += a
            if step == 3 and group.rank == 0:
                b[5] = torch.inf
            scaler.scale(torch.ones(()))  # it begins; its scale stays 1
            model.backward(a=a, b=b)
            for optimizer in optimizers:
                strategy.finish(optimizer)
                scaler.step(optimizer)
            scaler.update(1.0)
        return missing(group, strategy, model, given)["a"], bool(torch.isfinite(model.b).all())

    for off, finite in together(2, body, hosts=["a", "b"]):
        assert off < 1e-5
        assert finite


@pytest.mark.parametrize("spoilt", [True, False])
def test_what_is_said_at_last_as_it_is_comes_back_too(spoilt: bool) -> None:
    """Where gradients travel as they are again, what is unsaid goes with them, in a pass that may not count."""

    def body(group: Group) -> float:
        model = Heads()
        strategy, optimizer = AllReduce(codec="topk(0.01)"), torch.optim.SGD(model.parameters(), lr=1.0)
        strategy.attach(model, optimizer, World(group))
        given = {"a": torch.zeros(N)}
        for step in range(5):
            model.zero_grad()
            a = noise(group, step)
            if step == 3:
                coder_of(strategy).method = Method()
            if step == 3 and spoilt:
                model.backward(a=a, few=torch.full((50,), torch.inf if group.rank else 1.0))
                continue
            if step == 3:
                model.backward(few=torch.ones(50))
            else:
                model.backward(a=a)
                given["a"] += a
            optimizer.step()
        assert "a" not in coder_of(strategy).residuals
        return missing(group, strategy, model, given)["a"]

    assert max(together(2, body, hosts=["a", "b"])) < 1e-5


# ---- what is not encoded


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float64])
@pytest.mark.parametrize("codec", ["sign", "quantize(8, shared=True)", "lowrank(1)", "auto"])
def test_other_kinds_of_numbers_travel_as_they_are(codec: str, dtype: torch.dtype) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        model = Heads()
        model.other = nn.Parameter(torch.zeros(2000, dtype=dtype))
        strategy = AllReduce(codec=codec)
        strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
        values = torch.arange(2000).to(dtype) * (group.rank + 1)
        for _ in range(2):
            model.zero_grad()
            ((model.other * values).sum().real + model.a.sum()).backward()
        assert model.other.grad is not None
        return [model.other.grad.clone(), values]

    results = together(2, body, hosts=["a", "b"])
    for grad, _ in results:
        assert torch.equal(grad, (results[0][1] + results[1][1]).conj().resolve_conj() / 2)


# ---- runs that go on elsewhere


def saved(group: Group, **way: Any) -> dict[str, Any]:
    """What a member has to keep after a few steps."""
    model = Heads()
    strategy, optimizer = AllReduce(**way), torch.optim.SGD(model.parameters(), lr=1.0)
    strategy.attach(model, optimizer, World(group))
    for step in range(3):
        model.zero_grad()
        model.backward(a=noise(group, step), b=noise(group, step, "b"))
        optimizer.step()
    return copy.deepcopy(strategy.own_state())


def unsaid(states: list[dict[str, Any]]) -> torch.Tensor:
    left = torch.zeros(N)
    for state in states:
        for coder in state["coders"]:
            if "a" in coder["residuals"]:
                left += coder["residuals"]["a"][:N]
            for key, part in coder["returns"].items():
                if key.startswith("a@"):
                    left[int(key[2:]) : int(key[2:]) + part.numel()] += part
    return left


@pytest.mark.parametrize(
    ("way", "after"),
    [
        *(({"codec": "topk(0.2)"}, after) for after in ("abcd", "aabb", "aaab", "aaaa", "ab", "aabbcc")),
        *(({"codec": "topk(0.2)", "back": "topk(0.2)"}, after) for after in ("aabb", "aaaa", "ab")),
        ({"codec": "dgc(0.05)"}, "abb"),
        *(({"codec": "dgc(0.05)", "back": "topk(0.2)"}, after) for after in ("abb", "ab")),
    ],
    ids=str,
)
def test_what_is_unsaid_is_said_on_any_layout_of_hosts(way: dict[str, str], after: str) -> None:
    """Members stand still after the resume: what they said later is all that had been left."""
    states = together(4, lambda group: saved(group, **way), hosts=list("abcd"))
    left = unsaid(states)

    def body(group: Group) -> tuple[torch.Tensor, dict[str, Any]]:
        model = Heads()
        strategy, optimizer = AllReduce(**way), torch.optim.SGD(model.parameters(), lr=1.0)
        strategy.attach(model, optimizer, World(group))
        strategy.load_own_state(states[group.rank :: group.size])
        before = copy.deepcopy(strategy.own_state())
        for _ in range(25):
            model.zero_grad()
            model.backward(a=torch.zeros(N), b=torch.zeros(N))
            optimizer.step()
        return -model.a.detach().reshape(-1), before

    results = together(len(after), body, hosts=list(after))
    speak = [len(set(after)) == 1 or after.index(host) == rank for rank, host in enumerate(after)]
    assert torch.allclose(unsaid([state for (_, state), speaks in zip(results, speak) if speaks]), left, atol=1e-5)
    if not way["codec"].startswith("dgc"):  # whose momentum goes on
        assert all(torch.allclose(said, left, atol=1e-5) for said, _ in results)


@pytest.mark.parametrize(("size", "codec"), [(1, "topk(0.05)"), (1, None), (2, None)])
def test_what_nobody_can_take_over_is_told(size: int, codec: str | None) -> None:
    states = together(2, lambda group: saved(group, codec="topk(0.05)"), hosts=["a", "b"])
    norm = sum(float(r.norm()) ** 2 for s in states for r in s["coders"][0]["residuals"].values()) ** 0.5

    def body(group: Group) -> list[str]:
        told: list[str] = []
        model, strategy = Heads(), AllReduce(codec=codec)
        for p in model.parameters():
            strategy.attach(model, torch.optim.SGD([p], lr=1.0), World(group, tell=told.append))
        strategy.load_own_state(states[group.rank :: group.size])
        return told

    for told in together(size, body):
        assert f"of norm {norm:.3g}, is lost" in told[-1]
        assert len(told) == (1 if codec is None else 2)
        assert codec is None or "has no effect: this run has one member" in told[0]


# ---- several passes before one step


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize(("codec", "kind", "warned"), [
    ("dgc(0.05)", "two passes", 1), ("dgc(0.05)", "accumulated", 0), ("dgc(0.05)", "one pass", 0),
    ("dgc(0.05)", "two heads", 1), ("topk(0.05)", "two passes", 0),
])  # fmt: skip
def test_momentum_that_counts_twice_in_a_step_is_warned_of(codec: str, kind: str, warned: int, clears: bool) -> None:
    def body(group: Group) -> None:
        model, world = Heads(), World(group)
        strategy, optimizer = AllReduce(codec=codec), torch.optim.SGD(model.parameters(), lr=1.0)
        strategy.attach(model, optimizer, world)
        for step in range(3):
            model.zero_grad(set_to_none=clears)
            if kind in ("two passes", "accumulated"):
                world.accumulating = kind == "accumulated"
                model.backward(a=noise(group, step))
                world.accumulating = False
            model.backward(a=noise(group, step))
            if kind == "two heads":
                model.backward(b=noise(group, step, "b"))
            strategy.finish(optimizer)
            optimizer.step()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        together(2, body, hosts=["a", "b"])
    assert sum("run.accumulate()" in str(w.message) for w in seen) == 2 * warned
