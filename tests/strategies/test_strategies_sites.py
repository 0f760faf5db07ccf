"""All-reduce inside sites, rounds between them: what it equals, who is equal to whom and when, and how it resumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.strategies import AllReduce, DiLoCo, Local, Strategy, make_strategy, words_of
from paceline.testing.together import together
from paceline.transport.group import Group
from tests.strategies._apart import Member, closing, net

TWO = ("a", "a", "b", "b")


def sgd(p: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.1, momentum=0.5)


def trained(
    strategy: Callable[[], Strategy], steps: int, sites: Sequence[str] = TWO, end: bool = False
) -> list[list[torch.Tensor]]:
    """Everyone's weights after each step, before members agree, and at the end. Each site is a host."""

    def body(group: Group) -> list[torch.Tensor]:
        with closing(Member(group, strategy(), net(group.rank), sgd, site=sites[group.rank])) as member:
            member.train(steps)
            if end:
                member.strategy.together(end=True)
            return [*member.own, member.weights]

    return together(len(sites), body, hosts=sites)


def test_one_step_a_round_equals_synchronous_sgd() -> None:
    def plain(p: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(p, lr=0.1)

    def ends(strategy: Callable[[], Strategy]) -> list[torch.Tensor]:
        def body(group: Group) -> torch.Tensor:
            with closing(Member(group, strategy(), net(group.rank), plain, site=TWO[group.rank])) as member:
                member.train(6)
                return member.weights

        return together(4, body, hosts=TWO)

    levels, in_step = ends(lambda: Local(every=1, inner=AllReduce())), ends(AllReduce)
    assert all(torch.equal(w, levels[0]) for w in levels)
    torch.testing.assert_close(levels[0], in_step[0], rtol=1e-5, atol=1e-6)


def test_one_site_is_all_reduce() -> None:
    levels = trained(lambda: Local(every=2, inner="allreduce"), 5, ["a", "a"])
    assert torch.equal(levels[0][-1], trained(AllReduce, 5, ["a", "a"])[0][-1])


@pytest.mark.parametrize(
    ("sites", "says"), [("aa", "all 2 members are one site"), ("ab", "has no effect"), ("aab", "")]
)
def test_sites_between_or_within_which_nothing_happens_are_told(sites: str, says: str) -> None:
    def body(group: Group) -> list[str]:
        told: list[str] = []
        strategy = Local(every=2, inner="allreduce")
        with closing(Member(group, strategy, net(), site=sites[group.rank], tell=told.append)):
            return told

    for told in together(len(sites), body, hosts=list(sites)):
        assert len(told) == bool(says)
        assert not says or says in told[0]


def test_an_average_of_too_few_sites_says_that_they_are_counted() -> None:
    with pytest.raises(ConfigError, match="start at least 3, or use average=mean; the 4 members are 2 sites"):
        trained(lambda: Local(every=2, inner="allreduce", average="median"), 1)


def test_guests_need_rounds_between_sites() -> None:
    with pytest.raises(ConfigError, match="all 2 members are one site"):
        trained(lambda: DiLoCo(every=2, inner="allreduce", guests=2), 1, ["a", "a"])


def test_sites_of_one_member_are_members() -> None:
    levels = trained(lambda: DiLoCo(every=2, inner="allreduce"), 5, ["a", "b"])
    apart = trained(lambda: DiLoCo(every=2), 5, ["a", "b"])
    assert all(torch.equal(x[-1], y[-1]) for x, y in zip(levels, apart))


@pytest.mark.parametrize("sites", [TWO, ("a", "b", "a", "a")])
def test_a_site_is_one_member_with_the_batches_of_all(sites: Sequence[str]) -> None:
    """Against the same written out in one process."""
    names = sorted(set(sites))
    ranks = [[r for r, site in enumerate(sites) if site == name] for name in names]
    models = [net(0) for _ in names]
    optimizers = [sgd(model.parameters()) for model in models]
    for step in range(7):
        for model, optimizer, mine in zip(models, optimizers, ranks):
            optimizer.zero_grad()
            for rank in mine:
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
                loss = model(x).square().mean() + model(torch.ones(1, 6)).sum() * 0.1
                (loss / len(mine)).backward()
            optimizer.step()
        if step % 3 == 2:
            flat = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in models]
            mean = sum(len(mine) / len(sites) * w for mine, w in zip(ranks, flat))
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    found = trained(lambda: Local(every=3, inner=AllReduce()), 7, sites)
    for rank, site in enumerate(sites):
        expected = nn.utils.parameters_to_vector(models[names.index(site)].parameters()).detach()
        torch.testing.assert_close(found[rank][-1], expected, rtol=1e-4, atol=1e-6)


WORDS = [
    "diloco(every=4, inner=allreduce, codec='quantize(4), back=quantize(4)')",
    "diloco(every=8, overlap=overlap(2, fragments=3), inner='allreduce(bucket_mb=0.001)')",
    "sparseloco(every=3, warmup=3, inner=allreduce)",
    "local(every=3, average=loss, inner=\"allreduce(codec='quantize(8)')\")",
]


@pytest.mark.parametrize("words", [WORDS[1], *(pytest.param(w, marks=pytest.mark.slow) for w in WORDS)])
def test_members_of_a_site_are_always_equal_and_sites_at_the_end(words: str) -> None:
    found = trained(lambda: make_strategy(words), 11, end=True)
    for step in range(11):
        assert torch.equal(found[0][step], found[1][step])
        assert torch.equal(found[2][step], found[3][step])
    assert not torch.equal(found[0][4], found[2][4])
    assert all(torch.equal(member[-1], found[0][-1]) for member in found)


def test_a_median_of_three_sites_survives_a_bad_one() -> None:
    """Which has as many members as the others together."""
    sites = ("a", "b", "c", "c")

    def body(group: Group) -> torch.Tensor:
        strategy = Local(every=2, average="median", inner=AllReduce())
        with closing(Member(group, strategy, net(0), sgd, site=sites[group.rank])) as member:
            member.train(1)
            if sites[group.rank] == "c":
                for p in member.model.parameters():
                    p.data.fill_(1e6)
            member.train(1)
            return member.weights

    found = together(4, body, hosts=sites)
    assert all(torch.equal(w, found[0]) for w in found)
    assert float(found[0].abs().max()) < 100


@pytest.mark.parametrize("words", [WORDS[0], *(pytest.param(w, marks=pytest.mark.slow) for w in WORDS[1:])])
def test_resumed_within_a_round_equals_uninterrupted(words: str) -> None:
    def whole(group: Group) -> tuple[torch.Tensor, tuple[bytes, bytes]]:
        with closing(Member(group, make_strategy(words), net(0), sgd, site=TWO[group.rank])) as member:
            member.train(6)
            saved = member.save()
            member.train(5)
            member.strategy.together(end=True)
            return member.weights, saved

    done = together(4, whole, hosts=TWO)

    def again(group: Group) -> torch.Tensor:
        with closing(Member(group, make_strategy(words), net(3), sgd, site=TWO[group.rank])) as member:
            shared, own = done[group.rank][1]
            member.load(shared, [own], 6)
            member.train(5)
            member.strategy.together(end=True)
            return member.weights

    for weights, (expected, _) in zip(together(4, again, hosts=TWO), done):
        assert torch.equal(weights, expected)


def test_a_batch_of_fillers_moves_no_site() -> None:
    """At the end of an epoch a whole site may have no samples left."""

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        with closing(Member(group, Local(every=9, inner=AllReduce()), net(0), sgd, site=TWO[group.rank])) as member:
            member.train(2)
            member.world.tally.add(0 if TWO[group.rank] == "b" else 8, 8)
            before = member.weights
            member.train(1)
            return before, member.weights

    for rank, (before, after) in enumerate(together(4, body, hosts=TWO)):
        assert torch.equal(before, after) == (TWO[rank] == "b")


def test_words() -> None:
    assert words_of(make_strategy("local(every=100, inner=allreduce)")) == "local(inner='allreduce')"
    assert "bucket_mb=8.0" in words_of(Local(inner=AllReduce(bucket_mb=8)))
    with pytest.raises(ConfigError, match="inner strategy"):
        make_strategy("local(inner=sync)")
    with pytest.raises(ConfigError, match="all-reduce"):
        Local(inner=Local())  # type: ignore[arg-type]


def test_sites_that_change_nothing_are_told() -> None:
    told: list[str] = []

    def body(group: Group) -> None:
        with closing(Member(group, Local(inner=AllReduce()), net(0), site=str(group.rank), tell=told.append)):
            pass

    together(2, body, hosts=["a", "b"])
    assert any("site of its own" in line for line in told)
