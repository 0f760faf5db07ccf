"""The server strategies in the training loop: sync equals all-reduce, resume is exact, the others train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.strategies import AllReduce, Async, Bounded, Strategy, Sync, World, make_strategy
from paceline.strategies.options import options_of
from paceline.strategies.server import Served
from paceline.testing.together import together
from paceline.transport.group import Group


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
        self.unused = nn.Parameter(torch.ones(5))
        generator = torch.Generator().manual_seed(0)  # members are threads here, and share the global one
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def train(group: Group, strategy: Strategy, steps: int, *, rate: float = 0.1, **options: Any) -> nn.Module:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, **{"momentum": 0.9, **options})
    world = World(group, wires=group._wires, limit_s=20.0)
    strategy.attach(model, optimizer, world)
    generator = torch.Generator().manual_seed(group.rank)
    for step in range(steps):
        for each in optimizer.param_groups:
            each["lr"] = rate / (step + 1)  # a schedule, which travels with the push
        optimizer.zero_grad()
        x = torch.randn(8, 20, generator=generator)
        model(x).square().mean().backward()
        if strategy.finish(optimizer):
            optimizer.step()
    strategy.together()
    strategy.close()
    return model


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "a", "b", "b"], ["a", "b", "b"]], ids="-".join)
def test_one_push_per_host_gives_what_one_per_worker_gives(hosts: list[str]) -> None:
    def parameters(strategy: type[Sync], **options: Any) -> list[list[torch.Tensor]]:
        return together(len(hosts), lambda g: list(train(g, strategy(**options), 4).parameters()), hosts=hosts)

    together_pushed, pushed = parameters(Sync, per_host=True), parameters(Sync)
    for mine in together_pushed:
        for p, first, other in zip(mine, together_pushed[0], pushed[0]):
            assert torch.equal(p, first)
            torch.testing.assert_close(p, other)


HOSTS = {"one host": ["a", "a"], "two hosts": ["a", "b"], "three members on two hosts": ["a", "b", "a"]}


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_sync_equals_all_reduce(hosts: list[str]) -> None:
    def body(group: Group) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        served = train(group, Sync(), 5, weight_decay=0.01)
        reduced = train(group, AllReduce(), 5, weight_decay=0.01)
        return list(served.parameters()), list(reduced.parameters())

    results = together(len(hosts), body, hosts=hosts)
    for served, reduced in results:
        for mine, first, other in zip(served, results[0][0], reduced):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("strategy", ["async", "bounded(staleness=1)", "async(correct='drop(4)')"])
def test_all_end_with_the_same_weights_and_buffers(strategy: str) -> None:
    def body(group: Group) -> dict[str, torch.Tensor]:
        return train(group, make_strategy(strategy), 6, rate=0.01).state_dict()

    first, *others = together(3, body, hosts=["a", "b", "a"])
    for other in others:
        floats = [name for name, value in first.items() if value.is_floating_point()]
        assert all(torch.equal(first[name], other[name]) for name in floats)
    assert all(torch.isfinite(value).all() for value in first.values())


def test_a_run_of_one_has_no_servers() -> None:
    from paceline.transport.group import solo

    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = Async()
    strategy.attach(model, optimizer, World(solo()))
    assert strategy.finish(optimizer)
    strategy.together()
    strategy.close()


def test_an_optimizer_state_comes_here_for_a_checkpoint_and_goes_back() -> None:
    def body(group: Group) -> bool:
        model = Small()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        strategy = Sync()
        strategy.attach(model, optimizer, World(group, wires=group._wires, limit_s=20.0))
        for _ in range(3):
            model(torch.ones(4, 20) * (group.rank + 1)).square().mean().backward()
            assert not strategy.finish(optimizer)
        strategy.together(keep=True)
        if group.rank == 0:
            held = model.layers[0].weight
            assert optimizer.state[held]["exp_avg"].shape == held.shape
            assert optimizer.state[held]["step"] == 3
            assert model.unused not in optimizer.state
        strategy.load_own_state([])
        assert not optimizer.state
        strategy.together(keep=True)
        good = group.rank > 0 or optimizer.state[model.layers[0].weight]["step"] == 3
        strategy.close()
        return bool(good)

    assert together(2, body) == [True, True]


def test_parameters_that_are_added_later_are_served_too() -> None:
    def body(group: Group) -> list[torch.Tensor]:
        model = Small()
        head = list(model.layers[3].parameters())
        rest = [p for p in model.parameters() if not any(p is h for h in head)]
        optimizer = torch.optim.SGD(head, lr=0.1)
        strategy = Sync()
        strategy.attach(model, optimizer, World(group, wires=group._wires, limit_s=20.0))
        optimizer.add_param_group({"params": rest, "lr": 0.01})
        strategy.extend(optimizer)
        own = torch.Generator().manual_seed(group.rank)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 20, generator=own)).square().mean().backward()
            strategy.finish(optimizer)
        strategy.close()
        return list(model.parameters())

    first, second = together(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not torch.equal(first[1], list(Small().parameters())[1])


def test_what_cannot_be_served_is_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    def body(group: Group) -> list[str]:
        told = []
        for optimizer, strategy in (
            (Own(Small().parameters(), lr=0.1), Sync()),
            (torch.optim.SGD(Small().parameters(), lr=0.1, momentum=0.9), Async(correct="dana(0.9)")),
        ):
            with pytest.raises(ConfigError) as error:
                strategy.attach(Small(), optimizer, World(group, wires=group._wires, limit_s=20.0))
            told.append(str(error.value))
            strategy.close(failed=True)
        return told

    class_error, momentum_error = together(2, body)[0]
    assert "Own is another one" in class_error
    assert "momentum" in momentum_error


def test_words_name_the_same_objects() -> None:
    for words, kind in (("sync", Sync), ("sync(backups=1)", Sync), ("bounded(staleness=3)", Bounded), ("async", Async)):
        made = make_strategy(words)
        assert type(made) is kind
        assert isinstance(made, Served)
    with pytest.raises(ConfigError, match="did you mean 'staleness'"):
        make_strategy("bounded(stalenes=3)")
    with pytest.raises(ConfigError, match="unknown correction 'dano'"):
        make_strategy("async(correct='dano')")
    for wrong in ("bounded(staleness=-1)", "sync(backups=-1)"):
        with pytest.raises(ConfigError, match="0 or more"):
            make_strategy(wrong)


def test_servers_are_told_the_options_that_the_optimizer_has() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "tag": torch.float32, "initial_lr": 3}]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.5), betas=(0.9, 0.99))
    (told,) = options_of(optimizer)
    assert (told["lr"], told["betas"]) == (0.5, [0.9, 0.99])
    assert not {"params", "tag", "initial_lr"} & set(told)
    optimizer.param_groups[0]["eps"] = torch.float32
    with pytest.raises(ConfigError, match=r"parameter group 0 has eps=torch\.float32, a dtype"):
        options_of(optimizer)


@pytest.mark.parametrize("codec", ["nonzero", "topk(0.1)", "quantize(8)", "nonzero, back=quantize(8)"])
def test_codes_travel_between_hosts(codec: str) -> None:
    def body(group: Group) -> list[torch.Tensor]:
        return list(train(group, make_strategy("sync", codec), 5).parameters())

    first, second = together(2, body, hosts=["a", "b"])
    plain, _ = together(2, lambda group: list(train(group, Sync(), 5).parameters()), hosts=["a", "b"])
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    if codec == "nonzero":
        assert all(torch.equal(a, b) for a, b in zip(first, plain))
    else:
        assert not all(torch.equal(a, b) for a, b in zip(first, plain))


@pytest.mark.parametrize(
    ("strategy", "hosts"),
    [
        ("sync", "abb"),
        ("sync(backups=1)", "abc"),
        ("sync(per_host=True)", "aabb"),
        ("bounded(staleness=1)", "abc"),
        ("async(correct='dana(0.9) + drop(4)')", "abc"),
    ],
)
def test_weights_that_come_back_as_codes_train_as_well(strategy: str, hosts: str) -> None:
    """And all have the same in the end."""

    def body(group: Group, codec: str = "quantize(8), back=quantize(8)") -> list[torch.Tensor]:
        options = {"momentum": 0.0} if "dana" in strategy else {}
        return list(train(group, make_strategy(strategy, codec), 5, rate=0.02, **options).parameters())

    first, *others = together(len(hosts), body, hosts=list(hosts))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))
    assert all(torch.isfinite(p).all() for p in first)
    if strategy == "sync":
        plain, *_ = together(len(hosts), lambda group: body(group, ""), hosts=list(hosts))
        for p, exact in zip(first, plain):
            torch.testing.assert_close(p, exact, rtol=0.0, atol=0.01)


def test_corrections_that_go_by_what_was_sent_are_refused_where_it_is_known_only_nearly() -> None:
    for correct in ("compensate", "gap", "drop(4) + compensate + dana(0.9)"):
        make_strategy(Async(correct=correct), "quantize(8)")
        with pytest.raises(ConfigError, match=r"(compensate|gap).* goes by the weights that each worker was sent"):
            make_strategy(Async(correct=correct), "quantize(8), back=quantize(8)")
