"""Orders of pipelines, where graphs are cut, and what passes between stages; without processes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.parallel.balance import balanced, by_name, costs_of, layers_of
from paceline.parallel.post import _plain, _value
from paceline.parallel.schedule import SCHEDULES, bubble, orders, play, stages_each
from paceline.parallel.stages import in_stages
from paceline.parallel.trace import follow


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("members", [1, 2, 3, 4, 8])
def test_a_schedule_takes_as_long_as_its_formula_says(schedule: str, members: int) -> None:
    each = stages_each(schedule)
    costs = {"F": 1 / each, "B": 2 / each, "I": 1, "W": 1}
    for micros in range(members, 6 * members + 1, members):
        made = orders(schedule, members, micros)
        kinds = 3 if schedule == "zero-bubble" else 2
        assert all(len(set(order)) == len(order) == kinds * each * micros for order in made)
        took = play(made, each * members, costs)
        assert 1 - 3 * micros / took == pytest.approx(bubble(schedule, members, micros))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_no_member_holds_more_micro_batches_than_there_are_members(schedule: str) -> None:
    for order in orders(schedule, 4, 20):
        held = most = 0
        for action in order:
            held += {"F": 1, "I": 0}.get(action.kind, -1)
            most = max(most, held)
        assert held == 0
        assert most <= 4


def test_any_number_of_micro_batches_ends() -> None:
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        for micros in range(1, 12):
            assert play(orders(schedule, 5, micros), 5, dict.fromkeys("FBIW", 1.0)) > 0
    with pytest.raises(ConfigError, match="take a multiple of 5"):
        orders("interleaved", 5, 7)


def test_an_order_that_waits_for_itself_is_found() -> None:
    first, second = orders("1f1b", 2, 2)
    with pytest.raises(AssertionError, match="wait for each other"):
        play([first, second[::-1]], 2, dict.fromkeys("FBIW", 1.0))


def test_stages_are_balanced_by_what_is_measured() -> None:
    """Two layers that compute most of it are kept apart, though the others have most of the weights."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(200):
                x = x @ self.weight
            return x

    model = nn.Sequential(Slow(), Slow(), nn.Linear(32, 64), nn.Linear(64, 512), nn.Linear(512, 32))
    found = follow(model)
    runs = layers_of(found.graph, model)
    plain = costs_of(runs, found, model, (), torch.device("cpu"))
    assert balanced(plain, 2) == [0, 4]
    example, before = torch.randn(8, 32), torch.get_rng_state()
    timed = costs_of(runs, found, model, (example,), torch.device("cpu"))
    assert sum(timed) == pytest.approx(1)
    assert balanced(timed, 2)[1] == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    found = follow(empty)
    runs = layers_of(found.graph, empty)
    assert len(costs_of(runs, found, empty, (torch.randn(4, 8),), torch.device("cpu"))) == 3
    assert all(p.is_meta for p in empty.parameters())


def test_a_skip_connection_goes_where_it_is_needed_and_nowhere_else() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            first = self.a(x)
            second = self.b(first) + torch.ones(4)  # a constant
            return {"out": self.d(self.c(second) + y) + first, "second": second}

    model = Skip()
    graph = follow(model).graph
    runs = layers_of(graph, model)
    stages = in_stages(graph, runs, by_name(runs, ["b", "c", "d"], 4), model)
    assert [stage.gives for stage in stages] == [{1: [0], 3: [0]}, {2: [0], 3: [0]}, {3: [0]}, {}]
    assert [stage.takes for stage in stages] == [{}, {0: [0]}, {1: [0]}, {0: [0], 1: [0], 2: [0]}]
    assert not hasattr(model, "_tensor_constant0")
    assert [stage.inputs for stage in stages] == [[0], [], [1], []]


def test_modules_within_lists_are_called_as_they_are() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Odd(), nn.Linear(3, 3))
            self.odd = Odd()  # cannot be followed, so it is called too

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.odd(self.inner(x))

    called = Counter(node.target for node in follow(Model()).graph.nodes if node.op == "call_module")
    assert called == {"inner.0": 1, "inner.1": 1, "odd": 1}


def test_values_pass_as_plain_data() -> None:
    tensors: list[torch.Tensor] = []
    value = (torch.ones(2), [1, None, {"a": torch.zeros(1)}], slice(1, 3), torch.float32, torch.Size([2]), 0.5, "x")
    back = _value(_plain(value, tensors), tensors, torch.device("cpu"))
    assert torch.equal(back[0], value[0])
    assert back[1][:2] == [1, None]
    assert back[2:] == (slice(1, 3), torch.float32, (2,), 0.5, "x")
    with pytest.raises(ConfigError, match="a Fraction would pass from one stage to another"):
        _plain(Fraction(1, 2), [])
