"""What a run's weights and buffers are between rounds, what becomes of bad members, and how far members drift."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import PacelineError
from paceline.strategies import Local, make_strategy
from paceline.testing.together import together
from paceline.transport.group import Group
from tests.strategies._apart import Member, Normed, closing, net


@pytest.mark.parametrize("average", ["mean", "samples", "median"])
def test_buffers_are_averaged_as_parameters_are_and_counters_follow_the_first(average: str) -> None:
    size = 3 if average == "median" else 2

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        with closing(Member(group, Local(every=3, average=average), Normed())) as member:
            norm = member.model.norm
            if group.rank:
                norm.num_batches_tracked += 100
            member.train(2)
            member.world.tally.add(10 * (group.rank + 1), 10 * (group.rank + 1))
            own: list[torch.Tensor] = []
            norm.register_forward_hook(lambda *_: own.append(norm.running_mean.clone()))
            before = member.world.sent_bytes
            member.train(1)
            sent = member.world.sent_bytes - before
            return own[-1], norm.running_mean.clone(), int(norm.num_batches_tracked), sent

    results = together(size, body)
    rows = torch.stack([own for own, _, _, _ in results])
    expected = {
        "mean": rows.mean(0),
        "samples": (rows * torch.tensor([[1.0], [2.0], [3.0]])[:size]).sum(0) / 3,
        "median": rows.median(0).values,
    }[average]
    for _, mean, count, _ in results:
        torch.testing.assert_close(mean, expected)
        assert count == 6  # of the first member, whose model is called twice a step
    if average != "median":
        assert results[0][3] < 2 * 4 * 5000  # the constant stays at home


def test_between_rounds_the_runs_weights_are_those_of_the_last_round() -> None:
    def body(group: Group) -> None:
        with closing(Member(group, Local(every=4), Normed())) as member:
            member.train(4)
            agreed, statistics = member.weights, member.model.norm.running_mean.clone()
            member.train(2)
            own = member.weights
            assert not torch.equal(own, agreed)
            member.strategy.together()  # as before an evaluation: it costs no round
            with member.strategy.showing():
                assert torch.equal(member.weights, agreed)
                assert torch.equal(member.model.norm.running_mean, statistics)
            assert torch.equal(member.weights, own)
            assert member.strategy.readings()["rounds"] == 1
            member.strategy.together(end=True)
            assert member.strategy.readings()["rounds"] == 2
            told = [torch.frombuffer(bytearray(b), dtype=torch.float32) for b in group.exchange(_bytes(member.weights))]
            assert torch.equal(*told)

    together(2, body)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy().tobytes())


@pytest.mark.parametrize("words", ["local(every=4)", "diloco(every=6, overlap=overlap(3, fragments=2))"])
def test_counters_count_on_while_a_round_is_exchanged(words: str) -> None:
    def body(group: Group) -> int:
        with closing(Member(group, make_strategy(words), Normed())) as member:
            member.train(17)
            return int(member.model.norm.num_batches_tracked)

    assert together(2, body) == [34, 34]  # two forward passes a step


WORDS = ["local(every=2)", "local(every=2, codec=quantize(8))", "local(every=2, average=median)"]


@pytest.mark.parametrize("words", WORDS)
def test_a_member_whose_statistics_are_not_finite_is_left_out_too(words: str) -> None:
    def body(group: Group) -> torch.Tensor:
        with closing(Member(group, make_strategy(words), Normed())) as member:
            member.train(1)
            if group.rank == 1:
                member.model.norm.running_mean.fill_(torch.nan)
            member.train(3)
            member.strategy.together()
            with member.strategy.showing():
                return member.model.norm.running_mean.clone()

    results = together(3, body)
    assert all(torch.equal(mean, results[0]) for mean in results)
    assert bool(torch.isfinite(results[0]).all())


@pytest.mark.parametrize("words", WORDS)
def test_a_member_that_is_not_finite_is_left_out_and_comes_back(words: str) -> None:
    told: list[str] = []

    def body(group: Group) -> torch.Tensor:
        strategy = make_strategy(words)
        with closing(Member(group, strategy, net(), lambda p: torch.optim.Adam(p), tell=told.append)) as member:
            member.train(2)
            if group.rank == 1:
                with torch.no_grad():
                    next(iter(member.model.parameters()))[0, 0] = torch.nan
            member.train(2)
            assert bool(torch.isfinite(member.weights).all())
            member.train(2)
            return member.weights

    results = together(3, body)
    assert all(torch.equal(w, results[0]) for w in results)
    assert bool(torch.isfinite(results[0]).all())
    assert "weights or buffers of member 1 have become infinite or nan" in told[0]

    def checked(group: Group) -> None:
        with closing(Member(group, make_strategy(words), net(), check_finite=True)) as member:
            member.model[0].weight.data.fill_(torch.inf if group.rank else 0.0)
            member.train(2)

    with pytest.raises(PacelineError, match="member 1"):
        together(3, checked)


_SAMPLES, _LOSSES = (10, 30, 60), (0.5, 1.0, 2.0)


@pytest.mark.parametrize(
    ("average", "weights"),
    [
        ("mean", [1 / 3] * 3),
        ("samples", [0.1, 0.3, 0.6]),
        ("tokens", [0.1, 0.3, 0.6]),
        ("loss(temperature=0.5)", torch.softmax(-torch.tensor(_LOSSES) / 0.5, 0).tolist()),
        ("trimmed(1)", None),
        ("median", None),
    ],
)
def test_a_round_leaves_the_average_that_was_asked_for(average: str, weights: list[float] | None) -> None:
    """Of what the members had; without weights, the middle one of each element."""

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        with closing(Member(group, make_strategy(f"average(every=3, average={average})"), net())) as member:
            if hear := member.world.listen:
                told = {"tokens": _SAMPLES[group.rank], "loss": torch.tensor(_LOSSES[group.rank])}
                member.world.listen = lambda values: hear(told)
            for _ in range(3):
                member.world.tally.add(_SAMPLES[group.rank], _SAMPLES[group.rank])
                member.train(1)
            return member.own[-1], member.weights

    done = together(3, body)
    own = torch.stack([before for before, _ in done])
    expected = own.median(0).values if weights is None else torch.tensor(weights) @ own
    assert float((own[0] - own[1]).norm()) > 0.01
    for _, after in done:
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)


def test_the_median_survives_a_huge_member_and_the_mean_does_not() -> None:
    def run(average: str) -> torch.Tensor:
        def body(group: Group) -> torch.Tensor:
            with closing(Member(group, Local(every=2, average=average), net())) as member:
                for _ in range(2):
                    member.train(1)
                    if group.rank == 2:
                        with torch.no_grad():
                            member.model[0].weight += 1e6
                    member.train(1)
                return member.weights

        return together(3, body)[0]

    assert float(run("median").abs().max()) < 10
    assert float(run("trimmed").abs().max()) < 10
    assert float(run("mean").abs().max()) > 1e4


def test_a_batch_of_fillers_teaches_nothing() -> None:
    def body(group: Group) -> bool:
        with closing(Member(group, Local(every=9), net())) as member:
            member.train(1)
            before = member.weights
            member.world.tally.add(0, 8)
            member.train(1)
            return torch.equal(before, member.weights)

    assert together(2, body) == [True, True]


@pytest.mark.parametrize("codec", ["none", "sign"])
def test_the_drift_is_the_distance_from_the_mean(codec: str) -> None:
    """Within what a sketch can tell, also where the mean is told by a coarse codec."""

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor, float]:
        model = nn.Sequential(nn.Linear(6, 100), nn.Linear(100, 3))
        with closing(Member(group, Local(every=1, codec=codec), model)) as member:
            start, generator = member.weights, torch.Generator().manual_seed(group.rank)
            with torch.no_grad():
                for p in model.parameters():
                    p += torch.randn(p.shape, generator=generator)
            member.train(1)  # of which the noise is by far the larger part
            return start, member.own[-1], float(member.strategy.readings()["drift"])

    told = together(3, body, hosts=["a", "b", "c"])
    rows = torch.stack([weights for _, weights, _ in told])
    spread = (rows - rows.mean(0)).square().sum(1).mean().sqrt()
    expected = float(spread / told[0][0].norm())
    assert len({drift for _, _, drift in told}) == 1
    assert told[0][2] == pytest.approx(expected, rel=0.5)


def test_the_schedule_follows_the_drift() -> None:
    def body(group: Group) -> list[int]:
        lengths = []
        for target in 1e-6, 10.0:
            strategy = Local(every=f"drift({target}, least=2, most=5)")
            with closing(Member(group, strategy, net())) as member:
                member.train(20)
                lengths.append(int(strategy.readings()["every"]))
                assert strategy.readings()["drift"] > 0
        return lengths

    assert together(2, body) == [[2, 5], [2, 5]]


@pytest.mark.parametrize("words", ["diloco(every=3)", "diloco(every=6, overlap=overlap(3, fragments=2))"])
def test_parameters_may_be_added_and_trained_by_several_optimizers(words: str) -> None:
    def body(group: Group) -> torch.Tensor:
        model = net(group.rank)
        first, second, third = model[0], model[2], model[4]

        def some(_: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(first.parameters(), lr=0.1)

        with closing(Member(group, make_strategy(words), model, some)) as member:
            other = torch.optim.SGD(second.parameters(), lr=0.1)
            member.strategy.attach(model, other, member.world)
            for step in range(11):
                if step == 4:
                    member.optimizer.add_param_group({"params": list(third.parameters())})
                other.zero_grad()
                member.train(1)
                other.step()
            member.strategy.together(end=True)
            return member.weights

    weights = together(2, body)
    assert torch.equal(*weights)
    start = nn.utils.parameters_to_vector(net(0).parameters()).detach()
    moved = (weights[0] - start).abs()
    for part in torch.split(moved, [p.numel() for p in net(0).parameters()]):
        assert float(part.max()) > 1e-3


@pytest.mark.parametrize("words", ["local(every=1, average=loss)", "local(every=4, overlap=1, average=tokens)"])
@pytest.mark.parametrize("before", [True, False])
def test_rounds_that_are_a_step_apart_hear_what_is_logged_before_the_step_or_after(words: str, before: bool) -> None:
    """With overlap, the run also ends right after a fragment was sent."""

    def body(group: Group) -> torch.Tensor:
        with closing(Member(group, make_strategy(words), net(group.rank))) as member:
            listen, member.world.listen = member.world.listen, None
            assert listen is not None
            for step in range(8):
                if not before:
                    member.train(1)
                listen({"loss": torch.tensor(1.0 + group.rank), "tokens": 8 * (1 + step)})
                if before:
                    member.train(1)
            member.strategy.together(end=True)
            return member.weights

    first, second = together(2, body, hosts=["a", "b"])
    assert torch.equal(first, second)
