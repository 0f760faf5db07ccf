"""Local steps: what they equal, when members wait for each other, and what a run's weights are between rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.codecs import Context, TopK
from paceline.core.errors import ConfigError, PacelineError, TimedOut
from paceline.strategies import AllReduce, DiLoCo, Local, PostLocal, SparseLoCo, Strategy, make_strategy, words_of
from paceline.strategies import choose as choose_strategy
from paceline.testing.together import together
from paceline.transport.group import Group, solo
from tests.strategies._apart import Member, closing, net


def slow(words: str) -> Any:
    return pytest.param(words, marks=pytest.mark.slow)


def trained(
    strategy: Callable[[], Strategy],
    steps: int,
    size: int = 2,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
    end: bool = False,
    **options: Any,
) -> list[torch.Tensor]:
    """Everyone's weights after so many steps."""

    def body(group: Group) -> torch.Tensor:
        with closing(Member(group, strategy(), net(group.rank), optimizer, **options)) as member:
            member.train(steps)
            if end:
                member.strategy.together(end=True)
            return member.weights

    return together(size, body, hosts=["a", "b", "c", "d"][:size])


# ---- equivalences


@pytest.mark.parametrize("size", [2, 3])
def test_one_local_step_equals_synchronous_sgd(size: int) -> None:
    apart, in_step = trained(lambda: Local(every=1), 7, size), trained(AllReduce, 7, size)
    assert all(torch.equal(w, apart[0]) for w in apart)
    torch.testing.assert_close(apart[0], in_step[0], rtol=1e-5, atol=1e-6)


def test_diloco_at_rate_one_without_momentum_equals_local_sgd() -> None:
    def adam(p: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(p, lr=0.01)

    diloco = trained(lambda: DiLoCo(every=3, outer="sgd(lr=1.0)"), 10, optimizer=adam)
    assert torch.equal(diloco[0], trained(lambda: Local(every=3), 10, optimizer=adam)[0])
    assert not torch.equal(diloco[0], trained(lambda: DiLoCo(every=3), 10, optimizer=adam)[0])


def test_one_member_equals_plain_training() -> None:
    plain, model = net(0), net(0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    member = Member(solo(), Local(every=2), model, lambda p: torch.optim.AdamW(p, lr=0.01))
    for _ in range(7):
        optimizer.zero_grad()
        (plain(member.batch()).square().mean() + plain(torch.ones(1, 6)).sum() * 0.1).backward()
        optimizer.step()
        member.train(1)
    member.strategy.together(end=True)
    assert torch.equal(member.weights, torch.cat([p.detach().reshape(-1) for p in plain.parameters()]))


def test_diloco_is_nesterov_on_the_mean_difference() -> None:
    """Against the same written out in one process."""
    models = [net(0), net(0)]
    anchor = nn.utils.parameters_to_vector(net(0).parameters()).detach()
    velocity = torch.zeros_like(anchor)
    inner = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for step in range(6):
        for rank, (model, optimizer) in enumerate(zip(models, inner)):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=generator)
            (model(x).square().mean() + model(torch.ones(1, 6)).sum() * 0.1).backward()
            optimizer.step()
        if step % 3 == 2:
            now = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in models]
            difference = torch.stack([anchor - w for w in now]).mean(0)
            velocity = 0.9 * velocity + difference
            anchor = anchor - 0.7 * (difference + 0.9 * velocity)
            for model in models:
                nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
    got = trained(lambda: DiLoCo(every=3), 6)
    torch.testing.assert_close(got[0], anchor, rtol=1e-5, atol=1e-6)


def test_post_local_is_all_reduce_first() -> None:
    post = trained(lambda: PostLocal(warmup=4, every=3), 4)
    assert torch.equal(post[0], trained(AllReduce, 4)[0])
    after = trained(lambda: PostLocal(warmup=4, every=3), 6)
    assert not torch.equal(after[0], after[1])  # two steps apart
    assert torch.equal(*trained(lambda: PostLocal(warmup=4, every=3), 7))


@pytest.mark.parametrize(
    "words",
    [
        "diloco(every=4, codec=quantize(8))",
        "sparseloco(every=4)",
        slow("local(every=4, codec='topk(0.2), back=quantize(8)')"),
        slow("local(every=4, codec=lowrank(2), outer=adam(lr=0.01))"),
        "local(every=4, average=loss(temperature=0.5))",
        slow("local(every=4, average=tokens)"),
        slow("local(every=2..6)"),
        slow("local(every=drift(0.02, least=2, most=6))"),
        slow("diloco(every=8, overlap=2)"),
        "diloco(every=8, overlap=overlap(3, fragments=2, merge=1.0))",
    ],
)
def test_members_are_equal_after_the_last_round(words: str) -> None:
    weights = trained(lambda: make_strategy(words), 17, end=True)
    assert torch.equal(*weights)
    assert bool(torch.isfinite(weights[0]).all())
    start = nn.utils.parameters_to_vector(net(0).parameters()).detach()
    assert float((weights[0] - start).norm()) > 0.1  # and they have learnt something


class Flat(nn.Module):
    """Whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def test_sparseloco_is_decayed_feedback_around_two_bits() -> None:
    """e ← 0.95·e + difference; the others get the top of e, which keeps the rest. Against the same written out."""
    pushes = [torch.randn(6, 2048, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def body(group: Group) -> torch.Tensor:
        with closing(Member(group, SparseLoCo(every=2), Flat())) as member:
            for x in pushes[group.rank]:
                member.optimizer.zero_grad()
                member.model(x).backward()
                member.optimizer.step()
            return member.weights

    codec = TopK(64 / 4096, values="2bit")
    anchor, unsaid = torch.linspace(-1, 1, 2048), [torch.zeros(2048), torch.zeros(2048)]
    for number in range(3):
        total = torch.zeros(2048)
        for rank, e in enumerate(unsaid):
            w = anchor - 0.1 * pushes[rank][2 * number]
            w = w - 0.1 * pushes[rank][2 * number + 1]
            payload = torch.empty(codec.nbytes(2048), dtype=torch.uint8)
            n = codec.encode_into((anchor - w) * 0.5, e.mul_(0.95), payload, Context())
            codec.decode_add(payload[:n], total)
        anchor = anchor - total
    for weights in together(2, body, hosts=["a", "b"]):
        torch.testing.assert_close(weights, anchor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "words", [slow("local(every=3)"), "diloco(every=3, codec=sign)", slow("local(every=3, average=median)")]
)
def test_hosts_with_several_members(words: str) -> None:
    """Sums are made within a host first, and its first member speaks for it; rows are everyone's own."""

    def body(group: Group) -> torch.Tensor:
        with closing(Member(group, make_strategy(words), Normed())) as member:
            member.train(7)
            member.strategy.together(end=True)
            return torch.cat([member.weights, member.model.norm.running_mean])

    apart = together(4, body, hosts=["a", "a", "b", "b"])
    assert all(torch.equal(w, apart[0]) for w in apart)
    if "codec" not in words:
        torch.testing.assert_close(apart[0], together(4, body)[0], rtol=1e-5, atol=1e-6)


# ---- who waits for whom


def test_members_of_unlike_speed_do_not_wait_for_each_other_between_rounds() -> None:
    """The second one takes no step of a round before the first has taken all but the last of its own, and the other
    way round in the next: with any wait between them neither would get there."""
    reached = [[threading.Event() for _ in range(3)] for _ in range(2)]

    def body(group: Group) -> int:
        with closing(Member(group, Local(every=5), net())) as member:
            for number in range(3):
                if group.rank == (number + 1) % 2:
                    assert reached[1 - group.rank][number].wait(10)
                member.train(4)
                reached[group.rank][number].set()
                member.train(1)
            return int(member.strategy.readings()["rounds"])

    assert together(2, body) == [3, 3]


def test_with_overlap_the_exchange_goes_on_while_members_train() -> None:
    """The other one sends its fragment only after this one has trained on for the steps of the overlap but one."""
    trained_on = threading.Event()

    def body(group: Group) -> torch.Tensor:
        with closing(Member(group, DiLoCo(every=8, overlap="overlap(4, fragments=2)"), net())) as member:
            if group.rank:
                assert trained_on.wait(10)
            member.train(7)  # the first fragment is sent after four steps, and mixed in after eight
            trained_on.set()
            member.train(9)
            member.strategy.together(end=True)
            return member.weights

    assert torch.equal(*together(2, body))


def test_members_that_took_unlike_numbers_of_steps_meet() -> None:
    """As where a GradScaler skips steps on one of them: whoever waits takes part in the rounds of the others."""

    def body(group: Group) -> tuple[int, torch.Tensor]:
        with closing(Member(group, Local(every=4), net())) as member:
            member.train(16 if group.rank else 10)
            member.strategy.together()
            member.train(4)
            member.strategy.together(end=True)
            return int(member.strategy.readings()["rounds"]), member.weights

    (some, first), (also, second) = together(2, body)
    assert some == also == 5  # two together, two for which the first one waited, one after
    assert torch.equal(first, second)


def test_who_does_not_come_to_a_round_is_not_waited_for_for_ever() -> None:
    gone = threading.Event()

    def body(group: Group) -> None:
        with closing(Member(group, Local(every=2), net())) as member:
            member.train(1)
            if group.rank:
                gone.wait(20)
                return
            with pytest.raises(TimedOut, match="--wait-limit-s"):
                member.train(1)
            gone.set()

    together(2, body, limit_s=1.0)


def test_a_checkpoint_is_granted_where_all_are_before_the_same_batch() -> None:
    def body(group: Group) -> list[bool]:
        granted = []
        with closing(Member(group, Local(every=2), net())) as member:
            member.world.wish = group.rank == 0
            for drawn in (8, 8), (8, 16), (16, 8):  # by the first and the second: one is a batch ahead for a while
                member.world.tally.add(8, drawn[group.rank])
                member.train(2)
                granted.append(member.world.granted)
                member.world.granted = False
        return granted

    assert together(2, body) == [[True, False, True]] * 2


# ---- weights between rounds, buffers, bad members


class Normed(nn.Module):
    """Statistics that are learnt, a counter, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(5000.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([self.inner(x), self.inner(x + 1)]))  # type: ignore[no-any-return]


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


@pytest.mark.parametrize(
    "words", ["local(every=2)", "local(every=2, codec=quantize(8))", "local(every=2, average=median)"]
)
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
    assert "weights of member 1 have become infinite or nan" in told[0]

    def checked(group: Group) -> None:
        with closing(Member(group, make_strategy(words), net(), check_finite=True)) as member:
            member.model[0].weight.data.fill_(torch.inf if group.rank else 0.0)
            member.train(2)

    with pytest.raises(PacelineError, match="member 1"):
        together(3, checked)


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


# ---- words


@pytest.mark.parametrize(
    "words",
    [
        "local",
        "local(every='50..400')",
        "local(every=100, outer='nesterov(lr=0.7, momentum=0.9)')",
        "local(every=8, overlap='overlap(steps=2, fragments=2, merge=0.5)', codec='sign(block=1024), feedback=False')",
    ],
)
def test_what_a_strategy_is_called_makes_it_again(words: str) -> None:
    called = words_of(make_strategy(words))
    assert words_of(make_strategy(called)) == called
    assert words_of(make_strategy("sparseloco")).count("decay=0.95") == 1


def test_a_name_on_the_command_line_goes_before_another_in_the_script() -> None:
    script = DiLoCo(every=200, codec="quantize(4)")
    assert choose_strategy(script, "diloco") == (script, "")
    chosen, told = choose_strategy(Local(every=200), "diloco")
    assert "nesterov" in words_of(chosen)
    assert told
    assert choose_strategy(Local(every=200), "local(every=100)")[0].options["every"] == 100  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "a whole number of steps"),
        ({"every": 1.5}, "a whole number of steps"),
        ({"every": "400..50"}, "from at least 1 step"),
        ({"every": "drift(0)"}, "more than 0"),
        ({"outer": "nesterof"}, "did you mean 'nesterov'"),
        ({"outer": "adam(lr=-1)"}, "lr"),
        ({"outer": 3}, "give words such as"),
        ({"outer": lambda p: 3}, "not a torch.optim.Optimizer"),
        ({"average": "medain"}, "did you mean 'median'"),
        ({"codec": "auto"}, "name a codec"),
        ({"codec": "dgc(0.01)"}, "use topk"),
        ({"codec": "sign, decay=2"}, "from 0 to 1"),
        ({"codec": "sign, back=sign", "average": "median"}, "only sums travel"),
        ({"overlap": -1}, "a whole number"),
        ({"overlap": 30}, "at most overlap=25"),
        ({"overlap": "overlap(5, merge=0)"}, "more than 0"),
        ({"warmup": -1}, "a whole number"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Local(**settings)


def test_members_with_unlike_settings_are_told() -> None:
    with pytest.raises(ConfigError, match="trains by every="):
        together(2, lambda group: Member(group, Local(every=2 + group.rank), net()))


def test_sparse_differences_send_a_hundredth() -> None:
    def sent(strategy: Callable[[], Strategy]) -> float:
        def body(group: Group) -> float:
            model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Linear(200, 3))
            with closing(Member(group, strategy(), model)) as member:
                before = member.world.sent_bytes or member.strategy._rounds._group.sent_bytes  # type: ignore[attr-defined]
                member.train(4)
                return float(member.world.sent_bytes - before)

        return together(2, body, hosts=["a", "b"])[0]

    assert sent(lambda: Local(every=4)) > 50 * sent(lambda: SparseLoCo(every=4))
