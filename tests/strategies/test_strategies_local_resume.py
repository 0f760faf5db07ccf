"""Members that train apart stop anywhere in a round, and go on bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.checkpoint import unpack
from paceline.strategies import make_strategy
from paceline.testing.together import together
from paceline.transport.group import Group
from tests.strategies._apart import Member, Normed, closing, net

STEPS = 19

WORDS = [
    "local(every=4)",
    "diloco(every=5)",
    "local(every=4, outer=adam(lr=0.1), codec=quantize(4))",
    "sparseloco(every=3)",
    "post_local(warmup=6, every=4, codec='sign, back=sign')",
    "local(every=2..5, average=loss)",
    "local(every=drift(0.01, least=2, most=5), average=tokens)",
    "diloco(every=8, overlap=2)",
    "diloco(every=6, overlap=overlap(3, fragments=2, merge=0.7), codec=topk(0.1))",
]


def adam(p: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, lr=0.01)


def whole(words: str, stop: int | None, size: int = 2) -> tuple[list[torch.Tensor], list[tuple[bytes, bytes]]]:
    """Weights at the end of a run, and what was saved after so many steps."""

    def body(group: Group) -> tuple[torch.Tensor, tuple[bytes, bytes]]:
        saved = (b"", b"")
        with closing(Member(group, make_strategy(words), Normed(), adam)) as member:
            if stop is not None:
                member.train(stop)
                saved = member.save()
            member.train(STEPS - (stop or 0))
            member.strategy.together(end=True)
            return torch.cat([member.weights, member.model.norm.running_mean]), saved

    done = together(size, body, hosts=["a", "b", "c"][:size])
    return [weights for weights, _ in done], [saved for _, saved in done]


def resumed(words: str, stop: int, saved: list[tuple[bytes, bytes]], size: int = 2) -> list[torch.Tensor]:
    own = [each for _, each in saved]

    def body(group: Group) -> torch.Tensor:
        with closing(Member(group, make_strategy(words), Normed(), adam)) as member:
            for p in member.model.parameters():
                p.data.fill_(group.rank)  # another process: other weights
            member.load(saved[0][0], own[group.rank :: size], stop)
            member.train(STEPS - stop)
            member.strategy.together(end=True)
            return torch.cat([member.weights, member.model.norm.running_mean])

    return together(size, body, hosts=["a", "b", "c"][:size])


@pytest.mark.parametrize("words", [WORDS[2], WORDS[-1], *(pytest.param(w, marks=pytest.mark.slow) for w in WORDS)])
def test_resumed_in_the_middle_of_a_round_equals_uninterrupted(words: str) -> None:
    """And a checkpoint changes nothing in the run that writes it."""
    never, _ = whole(words, None)
    for stop in 3, 10:
        stopped, saved = whole(words, stop)
        assert torch.equal(stopped[0], never[0])
        again = resumed(words, stop, saved)
        assert torch.equal(again[0], never[0]), stop
        assert torch.equal(again[1], never[1]), stop


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(stop=st.integers(0, STEPS), words=st.sampled_from(WORDS))
def test_resumed_anywhere_equals_uninterrupted(stop: int, words: str) -> None:
    stopped, saved = whole(words, stop)
    assert torch.equal(resumed(words, stop, saved)[0], stopped[0])


def test_the_model_of_a_checkpoint_is_what_members_agreed_on() -> None:
    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor, bytes]:
        with closing(Member(group, make_strategy("diloco(every=4)"), net(), adam)) as member:
            member.train(4)
            agreed = member.weights
            member.train(3)
            return agreed, member.weights, member.save()[0]

    for agreed, own, shared in together(2, body):
        kept = torch.cat([value.reshape(-1) for value in unpack(shared)["model"].values()])
        assert torch.equal(kept, agreed)
        assert not torch.equal(kept, own)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "words", ["local(every=4)", "diloco(every=5, codec=quantize(4))", "diloco(every=8, overlap=2)"]
)
def test_another_number_of_members_goes_on_from_the_last_round(words: str, size: int) -> None:
    """Who is new begins with what was agreed on, where the first one is in its round; residuals are handed on."""
    _, saved = whole(words, 10)
    weights = resumed(words, 10, saved, size)
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert bool(torch.isfinite(weights[0]).all())


@pytest.mark.slow
def test_another_schedule_or_outer_optimizer_begins_anew() -> None:
    _, saved = whole("diloco(every=5)", 7)
    for words in "local(every=3)", "diloco(every=8, overlap=2)", "allreduce":
        weights = resumed(words, 7, saved)
        assert torch.equal(*weights)
    _, saved = whole("allreduce", 7)
    assert torch.equal(*resumed("diloco(every=3)", 7, saved))


class Scales(nn.Module):
    """In half precision, without what not every processor can do in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.1, 1, 2000).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * float(x.sum())


def test_anchors_of_half_precision_are_kept_as_they_are() -> None:
    def body(group: Group) -> bytes:
        with closing(Member(group, make_strategy("diloco(every=2)"), Scales(), adam)) as member:
            member.train(3)
            return member.save()[0]

    for shared in together(2, body):
        anchor = unpack(shared)["strategy"]["rounds"]["parts"][0]["anchors"]["scale"]
        assert anchor.dtype == torch.float32
        assert not torch.equal(anchor, anchor.bfloat16().float())
        assert torch.equal(anchor.bfloat16(), unpack(shared)["model"]["scale"])
