"""Zero equals all-reduce and a single process, whatever is cut; and no member has what it need not have."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from _zero import OPTIMIZERS, STEPS, Net, Trainer, alone, batch, close, differ, whole, zero
from torch import nn

from paceline.core.errors import ConfigError, PacelineError
from paceline.strategies import AllReduce, World, Zero, choose, make_strategy, words_of
from paceline.strategies.cuts import Cuts
from paceline.strategies.own_part import OwnPart
from paceline.testing.together import together
from paceline.transport.group import Group, solo

BY_HOSTS = [["here", "here"], ["a", "b"]]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_members_equal_all_reduce_bit_for_bit_and_one_process(name: str, stage: int) -> None:
    make = OPTIMIZERS[name]

    def body(group: Group) -> list[dict[str, torch.Tensor]]:
        reduced = Trainer(group, AllReduce(bucket_mb=0.02), make).train().weights()
        return [reduced, Trainer(group, zero(stage), make).train().weights()]

    (reduced, cut), (_, other) = together(2, body)
    assert differ(cut, other) == []
    assert differ(cut, reduced) == []
    close(cut, alone(make, 2))


@pytest.mark.parametrize("stage", [1, 2])
def test_between_hosts(stage: int) -> None:
    make = OPTIMIZERS["adamw"]

    def body(group: Group) -> dict[str, torch.Tensor]:
        return Trainer(group, zero(stage), make).train().weights()

    first, second, third = together(3, body, hosts=["a", "a", "b"])
    assert differ(first, second) == []
    assert differ(first, third) == []
    close(first, alone(make, 3))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_four_members_equal_all_reduce_and_one_process(name: str, stage: int) -> None:
    make = OPTIMIZERS[name]

    def body(group: Group) -> list[dict[str, torch.Tensor]]:
        reduced = Trainer(group, AllReduce(bucket_mb=0.02), make).train().weights()
        return [reduced, Trainer(group, zero(stage), make).train().weights()]

    results = together(4, body)
    for reduced, cut in results:
        assert differ(cut, results[0][1]) == []
        assert differ(cut, reduced) == []
        close(cut, alone(make, 4), atol=1e-4)  # where a gradient is next to nothing, Adam makes much of its rounding


OTHERS = {
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_equal_all_reduce_and_their_state_comes_back(name: str) -> None:
    """Those that look at whole parameters are cut between parameters."""
    make = OTHERS[name]

    def body(group: Group) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], object, object]:
        reduced = Trainer(group, AllReduce(bucket_mb=0.02), make).train(4)
        cut = Trainer(group, zero(2), make).train(4)
        return reduced.weights(), cut.weights(), reduced.optimizer.state_dict()["state"], cut.saved()["optimizer"]

    (reduced, cut, state, saved), (_, other, *_) = together(2, body)
    assert differ(cut, other) == []
    close(cut, reduced, atol=1e-6)
    _same_state(saved["state"], state, exact=name != "fused")  # type: ignore[index]


def _same_state(ours: dict[int, dict[str, object]], theirs: dict[int, dict[str, object]], exact: bool = True) -> None:
    assert list(ours) == list(theirs)
    for i in ours:
        assert list(ours[i]) == list(theirs[i])
        for key, value in theirs[i].items():
            mine = ours[i][key]
            if isinstance(value, torch.Tensor):
                assert isinstance(mine, torch.Tensor)
                assert mine.shape == value.shape
                torch.testing.assert_close(mine, value, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7)
            else:
                assert mine == value


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_goes_from_two_to_four_to_one_to_two_bit_for_bit(name: str) -> None:
    make = OPTIMIZERS[name]
    (saved, expected), _ = together(2, lambda g: _saved_and_after(Trainer(g, zero(2), make).train(3)))

    def loaded_by_the_script(group: Group) -> object:
        trainer = Trainer(group, zero(2), make)
        trainer.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        return trainer.saved()["optimizer"]

    _same_state(together(2, loaded_by_the_script)[0]["state"], saved["optimizer"]["state"])
    reduced = together(2, lambda g: Trainer(g, AllReduce(bucket_mb=0.02), make).train(3).optimizer.state_dict())[0]
    _same_state(saved["optimizer"]["state"], reduced["state"])
    assert saved["optimizer"]["param_groups"] == reduced["param_groups"]
    for size in 4, 1, 2:
        again = together(size, lambda g: Trainer(g, zero(1 + g.size % 4 // 2), make).load(saved).saved())[0]  # noqa: B023
        assert differ(again["model"], saved["model"]) == []
        _same_state(again["optimizer"]["state"], saved["optimizer"]["state"])
        saved = again

    def go_on(group: Group) -> dict[str, torch.Tensor]:
        trainer = Trainer(group, zero(2), make).load(saved)
        trainer.at = 3
        return trainer.train(2).weights()

    assert differ(together(2, go_on)[0], expected) == []

    def by_all_reduce(group: Group) -> dict[str, torch.Tensor]:
        trainer = Trainer(group, AllReduce(bucket_mb=0.02), make).load(saved)
        trainer.at = 3
        return trainer.train(2).weights()

    assert differ(together(2, by_all_reduce)[0], expected) == []


def _saved_and_after(trainer: Trainer) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    saved = trainer.saved()
    assert not trainer.optimizer.state  # the first member keeps it no longer than the checkpoint needs
    return saved, trainer.train(2).weights()


# ---- memory


@pytest.mark.parametrize("stage", [1, 2])
def test_each_member_holds_its_part_of_the_state_and_no_more(stage: int) -> None:
    make = OPTIMIZERS["adamw"]

    def body(group: Group) -> tuple[int, int]:
        trainer = Trainer(group, zero(stage), make).train(2)
        assert isinstance(trainer.strategy, Zero)
        return trainer.strategy.state_bytes, len(trainer.optimizer.state)

    reference = whole(make).train(2).optimizer.state.values()
    total = sum(t.nbytes for state in reference for t in state.values())
    for held, left in together(4, body):
        assert left == 0
        assert held < 1.05 * total / 4


def test_no_whole_gradient_survives_backward() -> None:
    def body(group: Group) -> None:
        trainer = Trainer(group, zero(2), OPTIMIZERS["sgd"])
        for _ in range(2):
            trainer.optimizer.zero_grad()
            trainer.loss().backward()
            grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            assert len(grads) == 7
            assert all(isinstance(g, OwnPart) for g in grads)
            held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for g in grads for p in g.pieces}
            whole = sum(g.numel() * 4 for g in grads)
            assert sum(held.values()) < 0.6 * whole
            assert all(p.grad is None for p in trainer.model.never.parameters())
            trainer.step()

    together(2, body)


def test_a_large_parameter_travels_in_small_blocks() -> None:
    p = nn.Parameter(torch.zeros(1000, 100))
    cuts = Cuts(3, 40_000)
    blocks = cuts.grow(torch.optim.SGD([p], lr=1.0), [p])
    assert len(blocks) == 10
    assert max(b.numel for b in blocks) * 4 < 42_000
    owned = [sum(s.stop - s.start for b in blocks for s in b.of(rank)) for rank in range(3)]
    assert sum(owned) == p.numel()
    assert max(owned) - min(owned) < 0.02 * p.numel()


# ---- what scripts do between backward and step


@pytest.mark.parametrize("hosts", BY_HOSTS)
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_clipping_sees_the_global_norm(order: float, hosts: list[str]) -> None:
    def body(group: Group, strategy: AllReduce | Zero) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer, norms = Trainer(group, strategy, OPTIMIZERS["sgd"]), []
        for foreach in (None, False, None):
            trainer.optimizer.zero_grad()
            trainer.loss().backward()
            most = 0.1 if order != math.inf else 0.01
            norms.append(float(nn.utils.clip_grad_norm_(trainer.model.parameters(), most, order, foreach=foreach)))
            nn.utils.clip_grad_value_(trainer.model.parameters(), 0.01)
            trainer.step()
        return norms, trainer.weights()

    (norms, reduced), _ = together(2, lambda g: body(g, AllReduce(bucket_mb=0.02)), hosts=hosts)
    ours = together(2, lambda g: body(g, zero(2)), hosts=hosts)
    for mine, cut in ours:
        assert mine == pytest.approx(norms, rel=1e-5)
        assert mine == ours[0][0]
        close(cut, reduced)


def test_norms_take_one_exchange_however_many_gradients_there_are() -> None:
    def body(group: Group) -> int:
        trainer, count = Trainer(group, zero(2), OPTIMIZERS["sgd"]), 0
        trainer.loss().backward()
        inner = group.all_reduce

        def counted(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
            nonlocal count
            count += 1
            return inner(tensor, op)

        group.all_reduce = counted  # type: ignore[method-assign]
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)
        return count

    assert together(2, body) == [1, 1]


def test_what_needs_a_whole_gradient_is_refused_in_words() -> None:
    def body(group: Group) -> None:
        trainer = Trainer(group, zero(2), OPTIMIZERS["sgd"])
        trainer.loss().backward()
        grad = trainer.model.first.weight.grad
        assert grad is not None
        assert "of 1280 elements" in repr(grad)
        for wrong in (lambda: grad + 1, lambda: grad.abs().max(), lambda: grad[0].clone()):
            with pytest.raises((ConfigError, RuntimeError), match=r"zero\(stage=2\) keeps of each gradient only"):
                wrong()

    together(2, body)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_on_all_members_together(stage: int, fused: bool) -> None:
    def make(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, fused=fused)  # type: ignore[arg-type]

    def body(group: Group, strategy: AllReduce | Zero) -> tuple[list[float], dict[str, torch.Tensor]]:
        trainer, scales = Trainer(group, strategy, make), []
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)

        class Step:  # as the run's optimizer would
            _step_supports_amp_scaling = fused
            param_groups = trainer.optimizer.param_groups

            def step(self) -> None:
                for name in ("grad_scale", "found_inf") if fused else ():
                    setattr(trainer.optimizer, name, getattr(self, name))
                trainer.step()

        step = Step()
        for i in range(4):
            trainer.optimizer.zero_grad()
            loss = scaler.scale(trainer.loss())
            (loss * math.inf if i == 2 and group.rank else loss).backward()
            if not fused:
                scaler.unscale_(step)
                nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            scaler.step(step)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, trainer.weights()

    (scales, reduced), _ = together(2, lambda g: body(g, AllReduce(bucket_mb=0.02)))
    assert scales == [1024.0, 1024.0, 512.0, 512.0]
    for mine, cut in together(2, lambda g: body(g, zero(stage))):
        assert mine == scales
        close(cut, reduced)


@pytest.mark.parametrize("stage", [1, 2])
def test_schedulers_groups_and_parameters_that_come_later(stage: int) -> None:
    def body(group: Group, strategy: AllReduce | Zero) -> dict[str, torch.Tensor]:
        model = Net()
        model.second.requires_grad_(False)
        trainer = Trainer(group, strategy, lambda _: torch.optim.Adam(model.first.parameters(), lr=0.01), model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
        for i in range(5):
            if i == 1:
                model.last.requires_grad_(False)
            if i == 2:
                trainer.optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.1})
                strategy.extend(trainer.optimizer)
            if i == 3:
                model.last.requires_grad_(True)  # was frozen when it was added
            trainer.optimizer.zero_grad()
            trainer.loss().backward()
            trainer.step()
            scheduler.step()
        return trainer.weights()

    reduced = together(2, lambda g: body(g, AllReduce(bucket_mb=0.02)))[0]
    for cut in together(2, lambda g: body(g, zero(stage))):
        assert differ(cut, reduced) == []


@pytest.mark.parametrize("stage", [1, 2])
def test_accumulation_and_passes_that_add_up(stage: int) -> None:
    """Within accumulate() nothing travels; outside each pass does, and is added to the mean that is there."""

    def body(group: Group, strategy: AllReduce | Zero) -> dict[str, torch.Tensor]:
        trainer = Trainer(group, strategy, OPTIMIZERS["adamw"])
        for _ in range(3):
            trainer.optimizer.zero_grad()
            for kept in (True, False, True, False):
                trainer.world.accumulating = kept
                trainer.loss().backward()
                trainer.at += 1
            trainer.step()
        return trainer.weights()

    reduced = together(2, lambda g: body(g, AllReduce(bucket_mb=0.02)))[0]
    for cut in together(2, lambda g: body(g, zero(stage))):
        close(cut, reduced, atol=2e-5)


def test_a_step_with_what_was_never_exchanged_is_refused() -> None:
    def body(group: Group) -> None:
        trainer = Trainer(group, zero(2), OPTIMIZERS["sgd"])
        trainer.world.accumulating = True
        trainer.loss().backward()
        with pytest.raises(ConfigError, match="not exchanged"):
            trainer.step()
        trainer.optimizer.zero_grad()
        trainer.world.accumulating = False
        trainer.loss().backward()
        trainer.world.accumulating = True
        trainer.loss().backward()
        with pytest.raises(ConfigError, match="not exchanged"):
            trainer.step()

    together(2, body)


@pytest.mark.parametrize("stage", [1, 2])
def test_uneven_batches_weigh_by_their_samples(stage: int) -> None:
    def body(group: Group, strategy: AllReduce | Zero) -> dict[str, torch.Tensor]:
        trainer = Trainer(group, strategy, OPTIMIZERS["sgd"])
        for drawn in ((8, 8), (8, 3), (8, 0), (5, 8)):
            trainer.world.tally.add(drawn[group.rank], 8)
            trainer.train(1)
        return trainer.weights()

    reduced = together(2, lambda g: body(g, AllReduce(bucket_mb=0.02)))[0]
    for cut in together(2, lambda g: body(g, zero(stage))):
        close(cut, reduced, atol=1e-6)


# ---- models of all kinds


class Odd(nn.Module):
    """Tied, of several dtypes, in channels-last memory, with statistics, and with branches that not all take."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 40, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(40)
        self.left, self.right = nn.Linear(40, 40), nn.Linear(40, 40)
        self.tied = nn.Linear(40, 40)
        self.tied.weight = self.left.weight
        self.short = nn.Linear(40, 16).bfloat16()
        self.long = nn.Linear(16, 2).double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 5)

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        x = self.norm(self.conv(x.view(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last))).mean((2, 3))
        x = self.tied((self.right if right else self.left)(x).tanh())
        return self.long(self.short(x.bfloat16()).double())


@pytest.mark.parametrize("stage", [1, 2])
def test_models_of_many_kinds(stage: int) -> None:
    def body(group: Group, strategy: AllReduce | Zero) -> dict[str, torch.Tensor]:
        model = Odd()
        trainer = Trainer(group, strategy, OPTIMIZERS["adamw"], model)
        for step in range(4):
            trainer.optimizer.zero_grad()
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + group.rank))
            model(x, right=bool(group.rank and step % 2)).square().mean().backward()
            trainer.step()
        return trainer.weights()

    reduced = together(2, lambda g: body(g, AllReduce(bucket_mb=0.002)))[0]
    for cut in together(2, lambda g: body(g, Zero(stage=stage, bucket_mb=0.002))):
        assert differ(cut, reduced) == []


@pytest.mark.parametrize("stage", [1, 2])
def test_two_models_and_two_optimizers_of_one_model(stage: int) -> None:
    def body(group: Group, strategy: AllReduce | Zero) -> list[dict[str, torch.Tensor]]:
        first, second, world = Net(), Net(), World(group)
        ones = [torch.optim.SGD(first.first.parameters(), lr=0.1), torch.optim.Adam(first.last.parameters(), lr=0.01)]
        optimizers = [*ones, torch.optim.AdamW(second.parameters(), lr=0.01)]
        for model, optimizer in zip((first, first, second), optimizers):
            strategy.attach(model, optimizer, world)
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x = batch(step, group.rank)
            (first(x) - second(x)).square().mean().backward()
            for i, optimizer in enumerate(optimizers):
                if (i != 1 or step % 2) and strategy.finish(optimizer):
                    optimizer.step()
        return [{k: v.clone() for k, v in model.state_dict().items()} for model in (first, second)]

    reduced = together(2, lambda g: body(g, AllReduce(bucket_mb=0.02)))[0]
    for cut in together(2, lambda g: body(g, zero(stage))):
        assert [differ(a, b) for a, b in zip(cut, reduced)] == [[], []]


# ---- codecs


@pytest.mark.parametrize("hosts", BY_HOSTS)
@pytest.mark.parametrize(
    "codec", ["cast(bf16)", "quantize(8)", "topk(0.1)", "lowrank(2)", "quantize(8), back=quantize(8)"]
)
@pytest.mark.parametrize("stage", [1, 2])
def test_codecs_travel_as_with_all_reduce(codec: str, stage: int, hosts: list[str]) -> None:
    def body(group: Group, strategy: AllReduce | Zero) -> dict[str, torch.Tensor]:
        return Trainer(group, strategy, OPTIMIZERS["sgd"]).train(4).weights()

    plain = together(2, lambda g: body(g, AllReduce(bucket_mb=0.02)), hosts=hosts)[0]
    ours = together(2, lambda g: body(g, zero(stage, codec=codec)), hosts=hosts)
    assert differ(ours[0], ours[1]) == []
    assert differ(ours[0], plain)  # it was used
    if stage == 1:
        coded = together(2, lambda g: body(g, AllReduce(bucket_mb=0.02, codec=codec)), hosts=hosts)[0]
        assert differ(ours[0], coded) == []
    close(ours[0], plain, atol=0.2)


# ---- words and refusals


def test_words() -> None:
    assert words_of(make_strategy("zero")) == "zero"
    assert words_of(make_strategy("zero(stage=1, offload=optimizer)")) == "zero(stage=1, offload='optimizer')"
    assert make_strategy("zero", "quantize(8)").readings() == {}
    script = Zero(stage=1)
    assert choose(script, "zero(stage=1)") == (script, "")
    assert "goes before" in choose(script, "zero(stage=2)")[1]
    for wrong in ("zero(stage=3)", "zero(offload=disk)", "zero(bucket_mb=0)", "zero(stage=2, codec=dgc)"):
        with pytest.raises(ConfigError):
            make_strategy(wrong)


def test_members_that_come_and_go_are_refused() -> None:
    world, model = World(solo()), Net()
    world.elastic = True
    with pytest.raises(ConfigError, match="members cannot come and go"):
        Zero().attach(model, torch.optim.SGD(model.parameters(), lr=0.1), world)


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    def body(group: Group) -> None:
        trainer = Trainer(group, zero(1), OPTIMIZERS["sgd"])
        with pytest.raises(ConfigError, match="in two optimizers"):
            trainer.strategy.attach(trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=0.1), trainer.world)

    together(2, body)


def test_a_run_of_one_is_plain_pytorch() -> None:
    said: list[str] = []
    world, model, make = World(solo(), tell=said.append), Net(), OPTIMIZERS["adamw"]
    optimizer, strategy = make(model.parameters()), Zero(offload="optimizer")
    strategy.attach(model, optimizer, world)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, 0)).square().mean().backward()
        assert strategy.finish(optimizer)
        optimizer.step()
    assert differ(dict(model.state_dict()), alone(make, 1)) == []
    assert said == ['zero(offload="optimizer") has no effect: the model is in host memory already']


def test_a_gradient_that_is_not_finite_is_named() -> None:
    def body(group: Group) -> None:
        model = Net()
        strategy = zero(2)
        strategy.attach(model, OPTIMIZERS["sgd"](model.parameters()), World(group, check_finite=True))
        with pytest.raises(PacelineError, match="'scale' on member 1"):
            (model(batch(0, 0)).sum() * (math.nan if group.rank else 1.0)).backward()

    together(2, body)


# ---- offload: the same on the CPU, where nothing is gained by it


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_host_memory_holds_the_state_and_the_step(
    name: str, stage: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.strategies.zero._on_devices", lambda optimizer: True)
    monkeypatch.setattr("paceline.strategies.hosted._CHUNK_BYTES", 4000)
    make = OPTIMIZERS[name]

    def body(group: Group) -> tuple[dict[str, torch.Tensor], dict[str, object], dict[str, torch.Tensor]]:
        trainer = Trainer(group, zero(stage, offload="optimizer"), make).train(4)
        weights, saved = trainer.weights(), trainer.saved()
        with torch.no_grad():
            trainer.model.scale += 1  # weights that change otherwise are not lost
        return weights, saved, trainer.train(1).weights()

    def plain(group: Group) -> tuple[dict[str, torch.Tensor], object, dict[str, torch.Tensor]]:
        trainer = Trainer(group, AllReduce(bucket_mb=0.02), make).train(4)
        weights, state = trainer.weights(), {k: dict(v) for k, v in trainer.optimizer.state_dict()["state"].items()}
        with torch.no_grad():
            trainer.model.scale += 1
        return weights, state, trainer.train(1).weights()

    expected, _, after = together(size, plain)[0]
    for weights, _, later in together(size, body):
        close(weights, expected)  # fused kernels round otherwise
        close(later, after)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finer_copies_of_half_precision_weights_go_through_checkpoints(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.strategies.zero._on_devices", lambda optimizer: True)
    make = OPTIMIZERS[name]

    def trainer(group: Group) -> Trainer:
        made = Trainer(group, zero(2, offload="optimizer"), make, Net().bfloat16())
        made.loss = lambda: made.model(batch(made.at, group.rank).bfloat16()).float().square().mean()  # type: ignore[method-assign]
        return made

    def straight(group: Group) -> tuple[dict[str, object], object, dict[str, torch.Tensor]]:
        made = trainer(group).train(3)
        saved = made.saved()
        made.strategy.together(keep=True)
        common = copy.deepcopy(made.strategy.state_dict())
        return saved, common, made.train(3).weights()

    saved, common, expected = together(2, straight)[0]
    for size in 1, 2:

        def again(group: Group) -> tuple[dict[str, object], object, dict[str, torch.Tensor]]:
            made = trainer(group)
            made.strategy.load_state_dict(copy.deepcopy(common))  # noqa: B023
            made.load(saved)  # noqa: B023
            made.at = 3
            kept = made.saved()
            made.strategy.together(keep=True)
            more = copy.deepcopy(made.strategy.state_dict())
            return kept, more, made.train(3).weights()

        saved, common, weights = together(size, again)[0]
    assert differ(weights, expected) == []

    def forgetful(group: Group) -> dict[str, torch.Tensor]:
        made = trainer(group).load(saved)
        made.at = 3
        return made.train(3).weights()

    assert differ(together(2, forgetful)[0], expected)  # the copies matter
