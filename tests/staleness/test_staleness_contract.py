"""What every correction promises, over the table: state that resumes bit for bit, workers that leave; settings."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from paceline.core.errors import CheckpointError, ConfigError
from paceline.staleness import (
    CORRECTIONS,
    ByAge,
    Correction,
    Dana,
    Decay,
    DelayCompensation,
    Drop,
    Push,
    make_corrections,
)

WORDS = [
    "by_age", "by_age(0.5)", "compensate", "compensate(0.5)", "compensate(adaptive=True)", "dana", "dana(0.5)",
    "decay(0.1)", "drop(3)", "gap",
    "drop(3) + compensate(adaptive=True) + gap + decay(0.1) + dana",
]  # fmt: skip
WORKERS = 3


def made(words: str) -> Correction:
    correction = make_corrections(words)
    assert correction is not None
    return correction


class Shard:
    """One piece, workers in turn, plain SGD; what was sent and applied is recorded."""

    def __init__(self, correction: Correction, kind: torch.dtype = torch.float32) -> None:
        self.correction = correction
        self.weights = torch.linspace(-1, 1, 7).to(kind)
        self.version = 0
        self.seen: list[torch.Tensor] = []

    def pull(self, worker: int, lr: float = 0.1) -> None:
        sent = self.correction.on_pull("w", self.weights, worker, lr)
        self.seen.append(sent.clone())

    def push(self, worker: int, lr: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(self.version)
        grad = torch.randn(7, generator=generator).to(self.weights.dtype)
        push = Push(worker=worker, age=WORKERS - 1, lr=lr)
        applied = self.correction.on_push("w", grad, self.weights, push)
        self.seen.append(applied.clone())
        self.weights.sub_(applied, alpha=lr)
        self.version += 1

    def go(self, rounds: int) -> None:
        for _ in range(rounds):
            for worker in range(WORKERS):
                self.push(worker)
                self.pull(worker)


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict | list):
        return [t for part in (state.values() if isinstance(state, dict) else state) for t in tensors(part)]
    return []


def plain(state: Any) -> bool:
    if isinstance(state, dict):
        return all(isinstance(key, str) and plain(value) for key, value in state.items())
    return all(map(plain, state)) if isinstance(state, list) else isinstance(state, torch.Tensor | int | float | str)


def names(state: Any) -> set[str]:
    """The keys of all dicts in it."""
    if isinstance(state, dict):
        return set(state).union(*map(names, state.values()))
    return set().union(*map(names, state)) if isinstance(state, list) else set()


def test_the_table_is_whole() -> None:
    assert {word.partition("(")[0].strip() for words in WORDS for word in words.split("+")} == set(CORRECTIONS)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", WORDS)
def test_resumed_is_uninterrupted(words: str, kind: torch.dtype) -> None:
    whole, file = Shard(made(words), kind), io.BytesIO()
    whole.go(90)  # past the push at which dana adds up anew
    torch.save(whole.correction.state_dict(), file)
    file.seek(0)
    rest = Shard(made(words), kind)
    rest.correction.load_state_dict(torch.load(file))
    whole.version += 4  # in which this piece was not pushed
    rest.weights, rest.version, whole.seen = whole.weights.clone(), whole.version, []
    whole.go(90)
    rest.go(90)
    assert all(a.equal(b) for a, b in zip(whole.seen, rest.seen, strict=True))
    assert whole.weights.equal(rest.weights)


@pytest.mark.parametrize("words", WORDS)
def test_state_is_plain_and_not_shared(words: str) -> None:
    one, other = Shard(made(words)), Shard(made(words))
    one.go(2)
    state = one.correction.state_dict()
    assert plain(state)
    other.correction.load_state_dict(state)
    before = [t.clone() for t in tensors(state)]
    other.go(2)
    assert all(a.equal(b) for a, b in zip(before, tensors(one.correction.state_dict()), strict=True))


@pytest.mark.parametrize("worker", [0, 9])  # one that has pushed before, and a new one
@pytest.mark.parametrize("words", WORDS)
def test_the_gradient_is_worked_on_in_place_and_not_kept(words: str, worker: int) -> None:
    shard = Shard(made(words))
    shard.go(2)
    grad = torch.ones(7)
    applied = shard.correction.on_push("w", grad, shard.weights, Push(worker=worker, age=2, lr=0.1))
    assert applied is grad
    state = [t.clone() for t in tensors(shard.correction.state_dict())]
    grad.fill_(float("nan"))
    assert all(a.equal(b) for a, b in zip(state, tensors(shard.correction.state_dict()), strict=True))


@pytest.mark.parametrize("words", WORDS)
def test_what_is_kept_of_a_pull_does_not_follow_the_weights(words: str) -> None:
    shard = Shard(made(words))
    shard.go(2)
    sent = shard.correction.on_pull("w", shard.weights, 1, 0.1)
    assert (sent is shard.weights) == ("dana" not in words)
    state = [t.clone() for t in tensors(shard.correction.state_dict())]
    shard.weights.zero_()
    assert all(a.equal(b) for a, b in zip(state, tensors(shard.correction.state_dict()), strict=True))


@pytest.mark.parametrize("words", WORDS)
def test_a_worker_that_has_left_leaves_nothing(words: str) -> None:
    shard = Shard(made(words))
    shard.go(2)
    for worker in 0, 1, 7:
        shard.correction.forget(worker)
    kept = names(shard.correction.state_dict())
    assert not kept & {"0", "1"}
    assert ("2" in kept) == shard.correction.reads
    shard.correction.forget(2)
    assert not names(shard.correction.state_dict()) & {"0", "1", "2"}


@pytest.mark.parametrize("words", ["compensate", "gap"])
def test_a_worker_that_comes_back_has_read_nothing(words: str) -> None:
    shard = Shard(made(words))
    shard.go(2)
    shard.push(2)  # so that worker 1's weights are old
    held, grad, push = made(words), torch.ones(7), Push(worker=1, age=2, lr=0.1)
    held.load_state_dict(shard.correction.state_dict())
    assert not held.on_push("w", grad.clone(), shard.weights, push).equal(grad)
    shard.correction.forget(1)
    assert shard.correction.on_push("w", grad.clone(), shard.weights, push).equal(grad)


@pytest.mark.parametrize("words", WORDS)
def test_words_make_the_same_again(words: str) -> None:
    correction = made(words)
    again = made(correction.words)
    assert again.words == correction.words
    assert type(again) is type(correction)


@pytest.mark.parametrize("words", WORDS)
def test_the_state_of_another_is_refused(words: str) -> None:
    correction = made(words)
    for other in WORDS:
        state = made(other).state_dict()
        if state["correction"] == correction.state_dict()["correction"]:
            correction.load_state_dict(state)
        else:
            with pytest.raises(CheckpointError, match=f"'{state['correction']}'"):
                correction.load_state_dict(state)


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("words", WORDS)
def test_drop_alone_refuses_pushes(words: str) -> None:
    ages = [made(words).accepts(Push(worker=0, age=age, lr=0.1)) for age in range(6)]
    assert ages == [age < 3 or "drop" not in words for age in range(6)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("by_age(0)", r"by_age\(power=0\).*above 0"),
        ("by_age(-1)", r"by_age\(power=-1\)"),
        ("by_age(1e999)", r"by_age\(power=inf\)"),
        ("compensate(0)", r"compensate\(strength=0\).*above 0"),
        ("compensate(1e999)", r"compensate\(strength=inf\)"),
        ("dana(0)", r"dana\(momentum=0\).*below 1"),
        ("dana(1)", r"dana\(momentum=1\)"),
        ("decay(0)", r"decay\(rate=0\).*above 0"),
        ("decay(1e999)", r"decay\(rate=inf\)"),
        ("decay", r"missing.*'rate'.*decay\(rate\)"),
        ("decay(nan)", r"decay\(rate='nan'\).*above 0"),
        ("compensate(inf)", r"compensate\(strength='inf'\).*above 0"),
        ("compensate(strength=[1])", r"compensate\(strength=\[1\]\)"),
        ("compensate(adaptive=1)", r"compensate\(adaptive=1\).*True or False"),
        ("by_age(True)", r"by_age\(power=True\).*above 0"),
        ("by_age(power='x')", r"by_age\(power='x'\).*above 0"),
        ("dana(x)", r"dana\(momentum='x'\).*below 1"),
        ("drop(True)", r"drop\(age=True\).*whole"),
        ("drop()", r"missing.*'age'.*drop\(age\)"),
        ("dana(0.5, momentum=0.9)", r"multiple values.*dana\(momentum=0.9\)"),
        ("drop(0)", r"drop\(age=0\).*1 or more"),
        ("drop(2.5)", r"drop\(age=2.5\).*whole"),
        ("drop(eight)", r"drop\(age='eight'\)"),
        ("gap(2)", "too many.*Write it as gap$"),
        ("gap(size=2)", "no option 'size': it has none"),
        ("compensat", "did you mean 'compensate'"),
        ("drop(2) + dona", "did you mean 'dana'"),
        ("dana(moment=0.9)", "did you mean 'momentum'"),
        ("drop(2) +", "cannot read correction"),
    ],
)
def test_wrong_settings_are_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_corrections(words)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), True, "3", None])
@pytest.mark.parametrize("kind", [ByAge, Dana, Decay, DelayCompensation, Drop])
def test_objects_refuse_them_too(kind: Any, number: Any) -> None:
    if kind is DelayCompensation and number is None:
        return  # its default
    with pytest.raises(ConfigError, match="number"):
        kind(number)


@pytest.mark.parametrize("given", [5, 1.0, {"drop": 3}, ["dana", 5], [None, 2], Dana])
def test_what_is_no_correction_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"corrections are needed.*dana\(0.9\)"):
        make_corrections(given)


@pytest.mark.parametrize(
    ("words", "optimizer", "options", "said"),
    [
        ("decay(0.1)", torch.optim.SGD, {"weight_decay": 0.01}, "weight_decay=0.01"),
        ("decay(0.1)", torch.optim.AdamW, {}, "weight_decay=0.01"),
        ("drop(3) + decay(0.1)", torch.optim.SGD, {"weight_decay": 0.01}, "weight_decay=0.01"),
        ("dana", torch.optim.SGD, {"momentum": 0.9}, "momentum=0.9"),
        ("dana", torch.optim.Adam, {}, "each element"),
        ("dana", torch.optim.Adagrad, {}, "each element"),
        ("dana", torch.optim.SGD, {"maximize": True}, "maximize"),
    ],
)
def test_optimizers_that_clash_are_refused(words: str, optimizer: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(words).check_optimizer(groups(optimizer, options)[0])


@pytest.mark.parametrize(
    ("words", "optimizer", "options"),
    [
        ("decay(0.1)", torch.optim.SGD, {"momentum": 0.9}),
        ("dana", torch.optim.SGD, {"weight_decay": 0.01}),
        ("decay(0.1) + dana", torch.optim.SGD, {}),
        ("compensate + gap + drop(2)", torch.optim.AdamW, {}),
        ("by_age", torch.optim.AdamW, {}),
    ],
)
def test_optimizers_that_do_not_clash_are_taken(words: str, optimizer: Any, options: dict[str, Any]) -> None:
    made(words).check_optimizer(groups(optimizer, options)[0])


def groups(optimizer: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    made_of: torch.optim.Optimizer = optimizer([torch.zeros(1, requires_grad=True)], lr=0.1, **options)
    return made_of.param_groups


def test_a_rate_that_turns_weights_around_is_refused() -> None:
    push = Push(worker=0, age=0, lr=2.0)
    with pytest.raises(ConfigError, match=r"decay\(rate=0.5\): at a learning rate of 2.0"):
        Decay(0.5).accepts(push)  # before anything is applied
    with pytest.raises(ConfigError, match=r"decay\(rate=0.5\): at a learning rate of 2.0"):
        Decay(0.5).on_push("w", torch.ones(1), torch.ones(1), push)


def test_decay_with_one_worker_is_weight_decay_of_sgd() -> None:
    decay, weights = Decay(0.3), torch.linspace(-1, 1, 9, dtype=torch.float64)
    parameter = weights.clone().requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=0.1, weight_decay=0.3)
    for _ in range(20):
        parameter.grad = parameter.detach().sin()
        optimizer.step()
        grad = weights.sin()
        weights.sub_(decay.on_push("w", grad, weights, Push(worker=0, age=0, lr=0.1)), alpha=0.1)
    torch.testing.assert_close(weights, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_words_objects_and_none() -> None:
    drop = Drop(4)
    assert make_corrections(drop) is drop
    assert make_corrections([drop]) is drop
    assert [make_corrections(nothing) for nothing in (None, "", " none ", [], ["none", ""])] == [None] * 5
    assert made("decay(1e+2)+drop(4)").words == "decay(rate=100.0) + drop(age=4)"
    several = make_corrections(["decay(0.1) + by_age", drop])
    assert several is not None
    assert several.words == "decay(rate=0.1) + by_age(power=1.0) + drop(age=4)"
