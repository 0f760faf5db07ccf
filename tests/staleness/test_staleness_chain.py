"""Chains: gradients forwards, weights backwards, and what does not go together is refused with the reason."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import CheckpointError, ConfigError
from paceline.staleness import ByAge, Chain, Correction, Dana, Decay, DelayCompensation, Drop, Push, make_corrections


def made(words: str) -> Correction:
    correction = make_corrections(words)
    assert correction is not None
    return correction


def push(worker: int, age: int = 0) -> Push:
    return Push(worker=worker, age=age, lr=0.1)


def test_compensation_before_dana_continues_from_what_was_sent() -> None:
    """DANA-DC: g + λ · g² · (w − sent), where sent is ahead of the weights; then the momentum of that."""
    chain, w = Chain(DelayCompensation(0.5), Dana(0.8)), torch.tensor([1.0, -2.0])
    chain.on_pull("w", w, 0, 0.1)
    w.sub_(chain.on_push("w", torch.tensor([2.0, 4.0]), w, push(0)), alpha=0.1)
    torch.testing.assert_close(w, torch.tensor([0.8, -2.4]))
    sent = chain.on_pull("w", w, 0, 0.1)
    torch.testing.assert_close(sent, torch.tensor([0.8 - 0.08 * 2, -2.4 - 0.08 * 4]))
    applied = chain.on_push("w", torch.tensor([1.0, 3.0]), w, push(0))
    g = [1 + 0.5 * 1 * 0.16, 3 + 0.5 * 9 * 0.32]
    torch.testing.assert_close(applied, torch.tensor([0.8 * 2 + g[0], 0.8 * 4 + g[1]]))


def test_scaling_before_dana_scales_what_is_gathered() -> None:
    chain, w = Chain(ByAge(), Dana(0.5)), torch.zeros(1)
    assert float(chain.on_push("w", torch.ones(1), w, push(0, age=4))) == 0.25
    assert float(chain.on_push("w", torch.ones(1), w, push(0, age=2))) == 0.625
    assert float(chain.on_pull("w", w, 0, 1.0)) == -0.5 * 0.625


def test_compensation_before_scaling_squares_the_whole_gradient() -> None:
    chain, w = Chain(DelayCompensation(1.0), ByAge()), torch.zeros(1)
    chain.on_pull("w", w, 0, 0.1)
    assert float(chain.on_push("w", torch.full((1,), 3.0), w + 1, push(0, age=2))) == (3 + 9) / 2


def test_every_part_must_accept() -> None:
    for chain in Chain(Drop(2), ByAge()), Chain(ByAge(), Drop(2)):
        assert [chain.accepts(push(0, age=age)) for age in range(4)] == [True, True, False, False]


def test_order_decides_which_weights_a_compensation_sees() -> None:
    for words, seen in ("decay(5) + compensate(1)", 0.5), ("compensate(1) + decay(5)", 1.0):
        chain, w = made(words), torch.ones(1)
        chain.on_pull("w", torch.zeros(1), 0, 0.1)
        assert float(chain.on_push("w", torch.full((1,), 2.0), w, push(0))) == 2 + 4 * seen
        assert float(w) == 0.5


def test_a_chain_reads_where_a_part_does() -> None:
    assert Chain(Drop(2), Dana()).reads
    assert not Chain(Drop(2), ByAge()).reads


def test_chains_in_chains_are_taken_apart() -> None:
    chain = Chain(Chain(Drop(2), ByAge()), Dana())
    assert [type(part) for part in chain.parts] == [Drop, ByAge, Dana]
    with pytest.raises(ConfigError, match="drop stands there twice"):
        Chain(chain, Drop(3))
    with pytest.raises(ConfigError, match="Write compensate before dana"):
        Chain(chain, DelayCompensation())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("drop(2) + by_age + drop(3)", "drop stands there twice. Write it once"),
        ("dana + dana(0.5)", "dana stands there twice"),
        ("decay(0.1) + decay(0.1)", "decay stands there twice"),
        ("by_age + gap", "by_age and gap both correct the same thing"),
        ("gap + drop(2) + by_age", "gap and by_age both correct the same thing"),
        ("dana + compensate", "compensate needs the gradient as the worker computed it.*Write compensate before dana"),
        ("dana + drop(3) + compensate", "Write compensate before dana"),
        ("by_age + compensate", "by_age has changed it. Write compensate before by_age"),
        ("gap + compensate", "Write compensate before gap"),
        ("dana + by_age", "what dana sends to workers counts on.*Write by_age before dana"),
        ("dana + gap", "Write gap before dana"),
    ],
)
def test_what_does_not_go_together_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_corrections(words)


@pytest.mark.parametrize("before", ["", "decay(0.1) + ", "drop(2) + "])
@pytest.mark.parametrize(
    "words", ["compensate + by_age + dana", "compensate + gap + dana", "gap + dana", "by_age + dana"]
)
def test_what_goes_together_is_taken(before: str, words: str) -> None:
    assert isinstance(made(before + words), Chain)


def test_the_state_of_a_chain_of_other_parts_is_refused() -> None:
    state = Chain(Drop(2), Dana()).state_dict()
    with pytest.raises(CheckpointError, match="state of 'drop' where that of 'dana'"):
        Chain(Dana(), Drop(2)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="state of 2 corrections"):
        Chain(Drop(2), Dana(), Decay(0.1)).load_state_dict(state)
