"""The all-reduce strategy: the mean over samples that exist, whatever the model and the loop do."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import ConfigError, Interrupted, PacelineError
from paceline.strategies import AllReduce, World, make_strategy
from paceline.testing.together import together
from paceline.transport.group import Group


def attached(group: Group, model: nn.Module, bucket_mb: float = 0.001, **options: object) -> tuple[World, AllReduce]:
    world = World(group, **options)  # type: ignore[arg-type]
    strategy = AllReduce(bucket_mb=bucket_mb)
    strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    return world, strategy


class Parts(nn.Module):
    """Uses only the parts it is told to."""

    def __init__(self, num: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [(3 + 40 * i, 2) for i in range(num)]
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(s, generator=generator)) for s in shapes])

    def forward(self, used: list[int], factor: float) -> torch.Tensor:
        return torch.stack([(self.parts[i] * self.parts[i] * factor).sum() for i in used]).sum()


@settings(max_examples=20, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=1, max_size=6),
            st.lists(st.integers(0, 5), min_size=1, max_size=6),
            st.integers(0, 4),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=4,
    ),
    bucket_kb=st.sampled_from([0.1, 1.0, 100.0]),
    worth_keeping=st.sampled_from([1, 50, 16384]),
)
def test_mean_over_samples_for_any_use_of_parameters(
    steps: list[tuple[list[int], list[int], int, int]], bucket_kb: float, worth_keeping: int
) -> None:
    """Members use unlike parts of the model with unlike numbers of samples, in any order, step after step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.strategies.buckets._WORTH_KEEPING", worth_keeping)
        _check_mean(steps, bucket_kb)


def _check_mean(steps: list[tuple[list[int], list[int], int, int]], bucket_kb: float) -> None:

    def body(group: Group) -> list[list[torch.Tensor | None]]:
        model = Parts(6, seed=group.rank)  # the first member's weights win
        world, _ = attached(group, model, bucket_kb / 1000)
        history = []
        for step in steps:
            world.tally.add(step[2 + group.rank], 4)
            model.zero_grad()
            model(step[group.rank], float(group.rank + 1)).backward()
            history.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.01 * p.grad
        return history

    results = together(2, body)
    model = Parts(6, seed=0)
    for step, (got, also) in enumerate(zip(*results)):
        weights = [steps[step][2], steps[step][3]]
        local = []
        for rank in range(2):
            model.zero_grad()
            model(steps[step][rank], float(rank + 1)).backward()
            local.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for i, p in enumerate(model.parameters()):
            mine, other = got[i], also[i]
            if local[0][i] is None and local[1][i] is None:
                assert mine is None
                assert other is None
                continue
            assert mine is not None
            assert other is not None
            assert torch.equal(mine, other)
            zero = torch.zeros_like(p)
            pair = [zero if g is None else g for g in (local[0][i], local[1][i])]
            expected = (weights[0] * pair[0] + weights[1] * pair[1]) / sum(weights)
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
            with torch.no_grad():
                p -= 0.01 * mine


def test_a_member_without_samples_adds_nothing_even_if_its_gradient_is_nan() -> None:
    def body(group: Group) -> torch.Tensor:
        model = nn.Linear(3, 1, bias=False)
        world, _ = attached(group, model)
        for _ in range(2):
            world.tally.add(4 if group.rank == 0 else 0, 4)
            model.zero_grad()
            x = torch.ones(4, 3) if group.rank == 0 else torch.full((4, 3), float("nan"))
            model(x).mean().backward()
        return model.weight.grad.clone()

    for grad in together(2, body):
        assert grad.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("worth_keeping", [1, 16384])
@pytest.mark.parametrize("reentrant", [True, False])
def test_shared_parameter_in_two_checkpointed_segments(
    reentrant: bool, worth_keeping: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With reentrant checkpointing its gradient arrives twice in one pass, the second after its bucket has left."""
    monkeypatch.setattr("paceline.strategies.buckets._WORTH_KEEPING", worth_keeping)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.shared = nn.Linear(4, 4)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = checkpoint(lambda t: self.shared(t).tanh(), x, use_reentrant=reentrant)
            return checkpoint(lambda t: self.shared(t).tanh(), x, use_reentrant=reentrant)

    def make() -> Model:
        model, generator = Model(), torch.Generator().manual_seed(5)
        for p in model.parameters():
            p.data.normal_(generator=generator)
        return model

    def data(rank: int) -> torch.Tensor:
        return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))

    def body(group: Group) -> list[torch.Tensor | None]:
        model = make()
        attached(group, model, bucket_mb=1e-5)
        for _ in range(3):
            model.zero_grad()
            model(data(group.rank)).square().mean().backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    results = together(2, body)
    reference = make()
    sum(reference(data(rank)).square().mean() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
    for a, b, p in zip(*results, reference.parameters()):
        if p.grad is None:
            assert a is None
            assert b is None
        else:
            assert torch.equal(a, b)
            torch.testing.assert_close(a, p.grad)


def test_unfrozen_later_and_added_later() -> None:
    def body(group: Group) -> list[list[float]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        world = World(group)
        strategy = AllReduce()
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        strategy.attach(model, optimizer, world)
        x = torch.full((1, 2), float(group.rank))
        model(x).sum().backward()
        model[0].requires_grad_(True)
        extra = nn.Parameter(torch.full((1,), float(group.rank)))
        optimizer.add_param_group({"params": [extra]})
        strategy.extend(optimizer)
        assert extra.item() == 0.0  # the first member's
        for _ in range(2):
            model.zero_grad()
            extra.grad = None
            (model(x).sum() + (extra * (group.rank + 1)).sum()).backward()
        grads = [p.grad for p in [*model.parameters(), extra]]
        assert all(g is not None for g in grads)
        return [g.flatten().tolist() for g in grads if g is not None]

    one, two = together(2, body)
    assert one == two
    assert one[-1] == [1.5]


def test_thawed_parameters_are_reduced_from_their_first_gradient_on() -> None:
    """Also where nothing that was trained before gets a gradient any more."""

    def body(group: Group) -> list[list[float]]:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        with torch.no_grad():
            model[0].weight.fill_(1.0)
            model[1].weight.fill_(1.0)
        model[1].requires_grad_(False)
        attached(group, model)
        seen = []
        x = torch.tensor([[1.0, 3.0]]) * (group.rank + 1)
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            seen.append(model[0].weight.grad.flatten().tolist())
        model[0].requires_grad_(False)
        model[1].requires_grad_(True)
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
            assert model[0].weight.grad is None
            seen.append(model[1].weight.grad.flatten().tolist())
        model[0].requires_grad_(True)
        for _ in range(2):
            model.zero_grad()
            model(x).sum().backward()
            seen.append(model[0].weight.grad.flatten().tolist() + model[1].weight.grad.flatten().tolist())
        return seen

    expected = [[1.5, 4.5, 1.5, 4.5]] * 2 + [[6.0, 6.0]] * 3 + [[1.5, 4.5, 1.5, 4.5, 6.0, 6.0]] * 2
    assert together(2, body) == [expected, expected]


def test_accumulation_sends_nothing_in_between() -> None:
    def body(group: Group) -> tuple[list[float], int, int]:
        model = nn.Linear(1, 1, bias=False)
        world, _ = attached(group, model)
        model(torch.ones(1, 1)).sum().backward()  # lays out the buckets
        model.zero_grad()
        before = group.sent_bytes
        world.accumulating = True
        for k in range(3):
            model(torch.full((1, 1), float(k + group.rank))).sum().backward()
        between = group.sent_bytes - before
        world.accumulating = False
        model(torch.full((1, 1), 10.0 + group.rank)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.flatten().tolist(), between, group.sent_bytes - before

    for grad, between, after in together(2, body):
        assert grad == [(0 + 1 + 2 + 10 + 1 + 2 + 3 + 11) / 2]
        assert between == 0
        assert after > 0


def test_batch_norm_statistics_are_the_first_members() -> None:
    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor, int]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model.register_buffer("constant", torch.full((4,), 1.0 + group.rank))
        attached(group, model)
        generator = torch.Generator().manual_seed(group.rank)
        for _ in range(3):
            model(torch.randn(8, 3, generator=generator) + 5 * group.rank).sum().backward()
        bn = model[1]
        return bn.running_mean.clone(), model.constant.clone(), int(bn.num_batches_tracked)

    (mean_0, constant_0, count_0), (mean_1, constant_1, count_1) = together(2, body)
    assert torch.equal(mean_0, mean_1)
    assert torch.equal(constant_0, constant_1)
    assert count_0 == count_1 == 3
    assert mean_0.abs().max() < 2.5  # of the first member's inputs, which are centred


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            nn.Linear(3, 4),
            r"'weight' is float32 of shape \(2, 3\) on member 0 but float32 of shape \(4, 3\) on member 1",
        ),
        (nn.Linear(3, 2, bias=False), r"'bias' is float32 of shape \(2,\) on member 0 but missing on member 1"),
        (nn.Linear(3, 2).double(), r"'weight' is float32 .* but float64"),
    ],
)
def test_a_model_that_differs_is_named_before_the_first_step(other: nn.Module, message: str) -> None:
    def body(group: Group) -> None:
        with pytest.raises(ConfigError, match=message):
            attached(group, nn.Linear(3, 2) if group.rank == 0 else other)

    together(2, body)


def test_a_gradient_that_is_not_finite_is_named_when_asked() -> None:
    def body(group: Group) -> None:
        model = nn.Linear(2, 1)
        attached(group, model, check_finite=True)
        model(torch.ones(1, 2)).sum().backward()
        x = torch.full((1, 2), float("inf") if group.rank == 1 else 1.0)
        with pytest.raises(PacelineError, match="parameter 'weight' on member 1"):
            model(x).sum().backward()

    together(2, body)


def test_a_failed_backward_pass_is_not_passed_over() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    def body(group: Group) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        _, strategy = attached(group, model)
        model(torch.ones(1, 2)).sum().backward()
        strategy.cleared()
        with pytest.raises(ZeroDivisionError):
            model[1](Fails.apply(model[0](torch.ones(1, 2)))).sum().backward()
        with pytest.raises(Interrupted, match="resume it from its last checkpoint"):
            strategy.cleared()
        with pytest.raises(Interrupted, match="resume it from its last checkpoint"):  # without zero_grad in between
            model(torch.ones(1, 2)).sum().backward()

    together(2, body)


def test_mixed_dtypes_and_channels_last() -> None:
    def body(group: Group) -> list[torch.Tensor]:
        model = nn.Module()
        model.bf16 = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        model.fp64 = nn.Parameter(torch.ones(7, dtype=torch.float64))
        model.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        attached(group, model)
        scale = float(group.rank + 1)
        for _ in range(2):
            model.zero_grad()
            loss = (model.bf16.float() * scale).sum() + (model.fp64 * scale).sum() + (model.image**2 * scale).sum()
            loss.backward()
        assert model.image.grad.stride() == model.image.stride()
        return [p.grad.clone() for p in (model.bf16, model.fp64)]

    for grads in together(2, body):
        assert grads[0].tolist() == [1.5] * 5
        assert grads[1].tolist() == [1.5] * 7


def test_words() -> None:
    strategy = make_strategy("allreduce(bucket_mb=2)")
    assert isinstance(strategy, AllReduce)
    assert strategy.bucket_bytes == 2_000_000
    for words, message in {
        "alreduce": "did you mean 'allreduce'",
        "allreduce(buckets=2)": "did you mean 'bucket_mb'",
        "allreduce(bucket_mb=0)": "must be more than 0",
        "allreduce(": "cannot read strategy",
    }.items():
        with pytest.raises(ConfigError, match=message):
            make_strategy(words)


def test_clipping_sees_the_mean_under_reentrant_checkpointing_of_everything() -> None:
    """All gradients arrive within the inner pass and one never does: the end must be found all the same."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 1, bias=False)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=True)

    def body(group: Group) -> list[list[float]]:
        model = Model()
        attached(group, model)
        seen = []
        for _ in range(3):
            model.zero_grad()
            x = torch.full((1, 3), float(group.rank + 1), requires_grad=True)
            model(x).sum().backward()
            assert model.body.weight.grad is not None  # before step(), where users clip
            seen.append(model.body.weight.grad.flatten().tolist())
        return seen

    assert together(2, body) == [[[1.5] * 3] * 3] * 2


def test_what_users_do_to_grad_data_does_not_part_the_members() -> None:
    def body(group: Group) -> list[list[float]]:
        model = nn.Linear(2, 1, bias=False)
        attached(group, model)
        seen = []
        for step in range(4):
            model.zero_grad(set_to_none=False)
            (model(torch.ones(1, 2, dtype=model.weight.dtype)).sum() * (group.rank + 1)).backward()
            assert model.weight.grad is not None
            seen.append(model.weight.grad.flatten().tolist())
            model.weight.grad.data = model.weight.grad.data.clamp(-1, 1)
            if step == 1:
                model.double()
        return seen

    assert together(2, body) == [[[1.5, 1.5]] * 4] * 2


def test_two_passes_over_an_uneven_batch_weigh_alike() -> None:
    def body(group: Group) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        world, _ = attached(group, model)
        for drawn in (4, 4 if group.rank == 0 else 1):
            world.tally.add(drawn, 4)
            model.zero_grad()
            x = torch.full((1, 1), 1.0 if group.rank == 0 else 6.0)
            model(x).sum().backward()
            (2 * model(x)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.flatten().tolist()

    for grad in together(2, body):
        assert grad == pytest.approx([3 * (4 * 1.0 + 1 * 6.0) / 5])


def test_a_parameter_put_in_by_hand_is_refused() -> None:
    def body(group: Group) -> None:
        model = nn.Linear(1, 1)
        world, strategy = attached(group, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.attach(model, optimizer, world)
        optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(2))]
        with pytest.raises(ConfigError, match=r"Use optimizer\.add_param_group"):
            strategy.finish(optimizer)

    together(2, body)


@pytest.mark.filterwarnings("ignore:paceline. member .. batches with unlike shares")
def test_the_batch_drawn_last_decides_the_weight() -> None:
    """Batches that no backward pass follows (an evaluation) weigh nothing; several loaders weigh once."""

    def body(group: Group) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        world, _ = attached(group, model)
        seen = []
        for draws in [[4]], [[1 + group.rank], [4]], [[4], [1]], [[3 - group.rank]]:
            for (drawn,) in draws:
                world.tally.add(drawn, 4)
            model.zero_grad()
            (model.weight.sum() * (1.0 + group.rank)).backward()
            assert model.weight.grad is not None
            seen.append(float(model.weight.grad))
        return seen

    first, second = together(2, body)
    assert first == second
    assert first == pytest.approx([1.5, 1.5, 1.5, (3 * 1 + 2 * 2) / 5])


def test_a_layer_unfrozen_with_a_short_batch_in_hand_is_weighed_like_the_others() -> None:
    def body(group: Group) -> tuple[float, float]:
        model = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)])
        world, _ = attached(group, model)
        sum(p.sum() for p in model).backward()  # type: ignore[union-attr]
        model.zero_grad()
        world.tally.add(4 - 3 * group.rank, 4)
        model[1].requires_grad_(True)
        (sum(p.sum() for p in model) * (1.0 + group.rank)).backward()
        assert model[0].grad is not None
        assert model[1].grad is not None
        return float(model[0].grad), float(model[1].grad)

    for one, other in together(2, body):
        assert one == other == pytest.approx((4 * 1 + 1 * 2) / 5)


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("drop", ["optimizer", "model", "zeros"])
def test_a_window_that_was_dropped_weighs_nothing(drop: str, num: int) -> None:
    def body(group: Group) -> list[float]:
        model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(num)])
        world, strategy = attached(group, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.attach(model, optimizer, world)
        seen = []
        for _ in range(2):
            world.tally.add(4 - 3 * group.rank, 4)
            world.accumulating = True
            sum(p.sum() for p in model).backward()  # type: ignore[union-attr]
            world.accumulating = False
            if drop != "model":
                strategy.cleared(optimizer)
            optimizer.zero_grad(set_to_none=drop != "zeros")
            world.tally.add(4, 4)
            (sum(p.sum() for p in model) * (1.0 + group.rank)).backward()
            seen += [float(p.grad) for p in model if p.grad is not None]
            model.zero_grad()
        return seen

    assert together(2, body) == [[1.5] * 2 * num] * 2


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("num", [1, 2])
def test_a_window_that_goes_on_keeps_its_weights(num: int, create_graph: bool) -> None:
    """Also where another optimizer's gradients are dropped, and where only one parameter has a gradient."""

    def body(group: Group) -> list[float]:
        model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(num)])
        world, strategy = attached(group, model)
        other = nn.Parameter(torch.ones(1))
        second = torch.optim.SGD([other], lr=0.1)
        strategy.attach(model, second, world)
        world.tally.add(4 - 3 * group.rank, 4)
        for last in False, True:
            world.accumulating = not last
            strategy.cleared(second)
            strategy.cleared()  # a batch is asked for
            (sum(p.sum() for p in model) * (1.0 + group.rank)).backward(create_graph=create_graph)  # type: ignore[union-attr]
            world.tally.add(4, 4)
        return [float(p.grad) for p in model if p.grad is not None]

    for grads in together(2, body):
        assert grads == pytest.approx([(1 + 0.25 * 2 + 1 + 2) / (1 + 0.625)] * num)


def test_a_layer_unfrozen_with_a_short_batch_in_hand_accumulates_like_the_others() -> None:
    def body(group: Group) -> list[float]:
        model = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)])
        world, strategy = attached(group, model)
        sum(p.sum() for p in model).backward()  # type: ignore[union-attr]
        model.zero_grad()
        world.tally.add(4 - 3 * group.rank, 4)
        model[1].requires_grad_(True)
        added = nn.Parameter(torch.ones(1))  # while the batch is in hand
        strategy.attach(model, torch.optim.SGD([added], lr=0.1), world)
        for world.accumulating in True, False:
            (sum(p.sum() for p in [*model, added]) * (1.0 + group.rank)).backward()  # type: ignore[union-attr]
        return [float(p.grad) for p in [*model, added] if p.grad is not None]

    for grads in together(2, body):
        assert grads == pytest.approx([2 * (4 * 1 + 1 * 2) / 5] * 3)


def test_a_filler_adds_nothing_to_a_layer_unfrozen_since_it_was_drawn() -> None:
    def body(group: Group) -> float:
        model = nn.Linear(1, 1, bias=False).requires_grad_(False)
        world, _ = attached(group, model)
        world.tally.add(4 - 4 * group.rank, 4)
        model.requires_grad_(True)
        (model.weight.sum() * (float("nan") if group.rank else 1.0)).backward()
        assert model.weight.grad is not None
        return float(model.weight.grad)

    assert together(2, body) == [1.0, 1.0]


@pytest.mark.parametrize(("steps", "times"), [([[4], [4, 4], [1], [4], [1]], 0), ([[4], [4, 1], [1, 4]], 1)])
def test_unlike_batches_between_two_backward_passes_are_warned_of_once(steps: list[list[int]], times: int) -> None:
    def body(group: Group) -> None:
        model = nn.Linear(1, 1, bias=False)
        world, _ = attached(group, model)
        for draws in steps:
            for drawn in draws:
                world.tally.add(drawn if group.rank else 4, 4)
            model(torch.ones(1, 1)).sum().backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        together(2, body)
    said = ["member 1: batches with unlike shares of real samples were drawn" in str(w.message) for w in caught]
    assert said == [True] * times
    assert all(w.filename == __file__ for w in caught)


def test_freezing_in_turns_makes_no_new_arenas() -> None:
    def body(group: Group) -> list[int]:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        attached(group, model)
        counts = []
        for step in range(8):
            for i, part in enumerate(model):
                part.requires_grad_(i == step % 2)
            model.zero_grad()
            model[step % 2](torch.ones(1, 3)).sum().backward()
            counts.append(len(group._arenas))
        return counts

    for counts in together(2, body):
        assert counts[-1] == 1
        assert counts[3:] == [1] * 5


def test_momenta_are_not_unsaid() -> None:
    def body(group: Group) -> tuple[float, float, float]:
        model, strategy = nn.Linear(100, 30, bias=False), AllReduce(codec="dgc(0.01, momentum=0.9)")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.attach(model, optimizer, World(group))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 100)).square().mean().backward()
            optimizer.step()
        (engine,) = strategy._engines.values()
        assert engine.coder is not None
        unsaid, momenta = engine.coder.residuals["weight"].view(2, -1)
        return strategy.readings()["residual_norm"], float(unsaid.norm()), float(momenta.norm())

    for told, unsaid, momenta in together(2, body, hosts=["a", "b"]):
        assert told == pytest.approx(unsaid)
        assert momenta > 0.1 * unsaid
