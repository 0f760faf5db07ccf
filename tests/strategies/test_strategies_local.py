"""Local steps: what they equal, when members wait for each other, and what a run's weights are between rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.codecs import Context, TopK
from paceline.core.errors import TimedOut
from paceline.strategies import AllReduce, DiLoCo, Local, PostLocal, SparseLoCo, Strategy, make_strategy
from paceline.testing.together import together
from paceline.transport.group import Group, solo
from tests.strategies._apart import Member, Normed, closing, net


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


def test_small_steps_of_half_precision_add_up() -> None:
    """One of two moves by the smallest step that there is, so that the mean moves by half of it."""
    step = 2.0**-7

    def body(group: Group) -> torch.Tensor:
        model = nn.Linear(4, 2, bias=False).to(torch.bfloat16)
        nn.init.ones_(model.weight)
        with closing(Member(group, Local(every=1), model, lambda p: torch.optim.SGD(p, lr=1.0))) as member:
            for _ in range(8):
                model.weight.grad = torch.full_like(model.weight, 0.0 if group.rank else -step)
                member.optimizer.step()
            return member.weights

    for weights in together(2, body):
        assert torch.equal(weights.float(), torch.full((8,), 1 + 4 * step))


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
