"""Asynchronous local steps: what a push does to the servers' weights, what workers have when, and how it resumes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import pack, unpack
from paceline.core.errors import ConfigError
from paceline.optim import DelayedNesterov
from paceline.strategies import AsyncLocal, Strategy, make_strategy, words_of
from paceline.testing.together import together
from paceline.transport.group import Group, solo
from tests.strategies._apart import Member, Normed, closing, net

BOTH_WAYS = "quantize(4), back=quantize(4)"


def adam(p: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, lr=0.01)


@settings(deadline=None, max_examples=30)
@given(
    workers=st.integers(1, 5),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    rounds=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_as_many_gradients_as_workers_are_a_step_of_nesterov(
    workers: int, momentum: float, rounds: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mine, theirs = (torch.nn.Parameter(torch.ones(7, dtype=torch.float64)) for _ in range(2))
    delayed = DelayedNesterov([mine], lr=0.3, momentum=momentum, workers=workers)
    plain = torch.optim.SGD([theirs], lr=0.3, momentum=momentum, nesterov=momentum > 0)
    for _ in range(rounds):
        gradients = torch.randn(workers, 7, generator=generator, dtype=torch.float64)
        for gradient in gradients:
            mine.grad = gradient
            delayed.step()
        theirs.grad = gradients.mean(0)
        plain.step()
    torch.testing.assert_close(mine, theirs)


def test_one_member_equals_plain_training() -> None:
    member, plain = Member(solo(), AsyncLocal(every=2), net(0), adam), net(0)
    optimizer = adam(plain.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        (plain(member.batch()).square().mean() + plain(torch.ones(1, 6)).sum() * 0.1).backward()
        optimizer.step()
        member.train(1)
    member.strategy.together(end=True)
    assert torch.equal(member.weights, torch.cat([p.detach().reshape(-1) for p in plain.parameters()]))


def apart(group: Group, strategy: Strategy, model: torch.nn.Module | None = None) -> Member:
    return Member(group, strategy, model or net(0), adam, wires=group._wires, limit_s=20.0)


def test_a_push_brings_the_difference() -> None:
    """One of two trains: its difference counts for half of the rate, and it goes on from the servers' weights."""

    def body(group: Group) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]:
        with closing(apart(group, AsyncLocal(every=3, lr=0.8, momentum=0.0))) as member:
            before = member.weights
            if group.rank == 0:
                member.train(3)
            after = member.weights
            member.strategy.together()
            return before, member.own, after, member.weights

    (before, own, after, end), (_, _, untouched, other) = together(2, body, hosts=["a", "b"])
    torch.testing.assert_close(after, before - 0.4 * (before - own[2]))
    assert not torch.equal(own[0], own[1])
    assert torch.equal(untouched, before)
    assert torch.equal(end, after)
    assert torch.equal(other, end)


def test_small_steps_of_half_precision_add_up() -> None:
    """Half of each counts, which half precision cannot hold: the servers' weights can. 3.5 steps are rounded to 4."""
    step = 2.0**-7

    def body(group: Group) -> torch.Tensor:
        model = torch.nn.Linear(4, 2, bias=False).to(torch.bfloat16)
        torch.nn.init.ones_(model.weight)
        strategy = AsyncLocal(every=1, lr=1.0, momentum=0.0)
        sgd = torch.optim.SGD
        with closing(
            Member(group, strategy, model, lambda p: sgd(p, lr=1.0), wires=group._wires, limit_s=20.0)
        ) as member:
            for _ in range(7 if group.rank == 0 else 0):
                model.weight.grad = torch.full_like(model.weight, -step)
                member.optimizer.step()
            strategy.together()
            return member.weights

    for weights in together(2, body, hosts=["a", "b"]):
        assert torch.equal(weights.float(), torch.full((8,), 1 + 4 * step))


def test_what_was_learnt_since_the_last_push_is_brought_when_all_meet() -> None:
    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with closing(apart(group, AsyncLocal(every=100, lr=2.0, momentum=0.0), Normed())) as member:
            before = member.weights
            if group.rank == 0:
                member.train(2)
            assert member.strategy.owes == (group.rank == 0)
            learnt = member.weights
            member.strategy.together(keep=True)
            assert not member.strategy.owes
            return before, learnt, torch.cat([member.weights, member.model.norm.running_mean])

    first, second = together(2, body, hosts=["a", "a"])
    torch.testing.assert_close(first[2][: len(first[1])], first[1])
    assert torch.equal(first[2], second[2])
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("order", [(3, 7), (7, 3)])
@pytest.mark.parametrize("named", [(), (3,), (7,), (3, 7)], ids=str)
def test_a_batch_that_counts_already_is_left_out_whatever_the_push_names(
    order: tuple[int, int], named: tuple[int, ...]
) -> None:
    """Batch 7 was begun by a lost worker, and all servers have it. At an epoch's end batches count as done before their
    push, which then names some of those that it is made of, or none."""

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        strategy = AsyncLocal(every=100, lr=2.0, momentum=0.0)
        with closing(Member(group, strategy, net(0), wires=group._wires, limit_s=20.0)) as member:
            before, member.world.counted = member.weights, {("1/7/0", 7): {(0, 0): 99, (0, 1): 99}}
            alone = net(0)  # trained on batch 3 alone
            for turn, number in enumerate(order if group.rank == 0 else ()):
                member.world.leases = lambda turn=turn: {"1/7/0": order[: turn + 1]}
                member.world.owed = lambda turn=turn: turn > 0
                strategy.wake()
                member.step = number
                if number == 3:
                    (alone(member.batch()).square().mean() + alone(torch.ones(1, 6)).sum() * 0.1).backward()
                member.train(1)
            member.world.leases = lambda: {"1/7/0": named} if named and group.rank == 0 else {}
            strategy.together()
            for p in alone.parameters():
                p.data -= 0.1 * p.grad if p.grad is not None else 0.0
            return before, torch.cat([p.detach().reshape(-1) for p in alone.parameters()]), member.weights

    (before, alone, found), _ = together(2, body, hosts=["a", "a"])
    assert not torch.allclose(before, alone)
    torch.testing.assert_close(found, alone)


def loss_of(model: torch.nn.Module) -> float:
    """What `Member.train` makes smaller, on other samples."""
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return float(model(x).square().mean() + model(torch.ones(1, 6)).sum() * 0.1)


@pytest.mark.parametrize("codec", ["", "quantize(8)", BOTH_WAYS])
def test_all_train_and_agree_in_the_end(codec: str) -> None:
    strategy = "async_local(every=4, lr=0.5, momentum=0.0)"  # small steps: how late pushes come is left to the machine

    def body(group: Group) -> tuple[torch.Tensor, float]:
        with closing(apart(group, make_strategy(strategy, codec))) as member:
            member.train(80)
            member.strategy.together(end=True)
            return member.weights, loss_of(member.model)

    found = together(3, body, hosts=["a", "b", "b"])
    assert all(torch.equal(weights, found[0][0]) for weights, _ in found)
    assert found[0][1] < loss_of(net(0))


def test_a_slow_worker_takes_fewer_steps_between_two_pushes() -> None:
    def body(group: Group) -> list[int]:
        with closing(apart(group, AsyncLocal(every=6))) as member:
            pushes = []
            for _ in range(2):
                before = member.strategy.versions  # type: ignore[attr-defined]
                for step in range(1, 13):
                    member.train(1)
                    time.sleep(0.03 * group.rank)
                    if not member.strategy.owes:
                        pushes.append(step)
                member.strategy.together()
                assert member.strategy.versions != before  # type: ignore[attr-defined]
            return pushes

    fast, slow = together(2, body, hosts=["a", "a"])
    assert fast == [6, 12] * 2
    assert slow[:2] == [6, 12]  # nothing is known in the first epoch
    assert slow[2] < 6


def test_weights_that_are_no_numbers_reach_no_server() -> None:
    told: list[str] = []

    def body(group: Group) -> torch.Tensor:
        with closing(apart(group, AsyncLocal(every=2))) as member:
            member.world.tell_own = told.append  # nobody else notices it
            if group.rank == 1:
                member.train(1)
                next(member.model.parameters()).data.fill_(torch.nan)
                member.train(1)
            member.strategy.together()
            return member.weights

    for weights in together(2, body, hosts=["a", "b"]):
        assert torch.isfinite(weights).all()
    assert [line for line in told if "member 1 have become infinite or nan" in line] == told != []


@pytest.mark.parametrize("codec", ["", BOTH_WAYS])
def test_resumed_equals_uninterrupted(codec: str) -> None:
    """One of two trains, so that the order of pushes is always the same."""

    def made() -> Strategy:
        return make_strategy("async_local(every=3)", codec)

    def train(member: Member, steps: int) -> None:
        if member.group.rank == 0:
            member.train(steps)
        member.strategy.together(keep=True)

    def whole(group: Group) -> tuple[torch.Tensor, bytes, bytes]:
        with closing(apart(group, made())) as member:
            train(member, 7)
            shared = {
                "strategy": member.strategy.state_dict(),
                "model": member.model.state_dict(),
                "optimizer": member.optimizer.state_dict(),
            }
            saved = group.exchange(pack(shared))[0], pack(member.strategy.own_state())
            train(member, 7)
            return member.weights, *saved

    done = together(2, whole, hosts=["a", "b"])

    def again(group: Group) -> torch.Tensor:
        with closing(apart(group, made(), net(5))) as member:
            _, shared, own = done[group.rank]
            state = unpack(shared)
            member.strategy.load_state_dict(state["strategy"])
            member.model.load_state_dict(state["model"])
            member.optimizer.load_state_dict(state["optimizer"])
            member.strategy.load_own_state([unpack(own)])
            member.step = 7
            train(member, 7)
            return member.weights

    for weights, (expected, _, _) in zip(together(2, again, hosts=["a", "b"]), done):
        assert torch.equal(weights, expected)


def test_words() -> None:
    assert words_of(make_strategy("async_local(every=20)")) == "async_local(every=20)"
    for wrong in ("async_local(every=0)", "async_local(lr=-1)", "async_local(momentum=1.5)"):
        with pytest.raises(ConfigError):
            make_strategy(wrong)
    assert make_strategy("async_local", "topk(0.1)").codec == "topk(0.1)"  # type: ignore[attr-defined]
    assert make_strategy("async_local", "none").codec == ""  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="codec dgc is for gradients, whose momentum it keeps"):
        make_strategy("async_local", "dgc")
    assert make_strategy("async", "dgc").codec == "dgc"  # type: ignore[attr-defined]
