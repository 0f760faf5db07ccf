"""Gradients that are lent: their memory goes with the last of them, and never under one that somebody holds."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _zero import Trainer
from torch import nn

from paceline.strategies import AllReduce, Strategy, Zero
from paceline.strategies.loans import Loans
from paceline.testing.together import together
from paceline.transport.group import Group
from paceline.transport.segment import Segment

NBYTES = 1 << 20
WIDTH = 600


@pytest.fixture
def made() -> Iterator[tuple[torch.Tensor, int]]:
    segment, descriptor = Segment.create(NBYTES)
    yield segment.data.view(torch.float32), descriptor
    os.close(descriptor)


def taken(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def test_memory_goes_with_the_last_that_was_lent(made: tuple[torch.Tensor, int]) -> None:
    flat, descriptor = made
    flat.fill_(3)
    lent = Loans().lend(flat)
    assert lent.data_ptr() == flat.data_ptr()
    first, second = lent[:1000].detach(), lent[1000:2000].detach().numpy()
    del lent, first
    assert taken(descriptor) >= NBYTES
    assert (second == 3).all()
    del second
    assert taken(descriptor) == 0


def test_what_fills_again_stays(made: tuple[torch.Tensor, int]) -> None:
    flat, descriptor = made
    flat.fill_(3)
    loans = Loans()
    before = loans.lend(flat)
    loans.recall()
    flat.fill_(4)
    del before
    assert bool((flat == 4).all())
    old, new = before_and_now(loans, flat)
    del old
    assert bool((new == 5).all())
    del new
    assert taken(descriptor) == 0


def before_and_now(loans: Loans, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient of an earlier pass, and one of this."""
    old = loans.lend(flat)
    loans.recall()
    flat.fill_(5)
    return old, loans.lend(flat)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_fork_drops_stays(made: tuple[torch.Tensor, int]) -> None:
    flat, descriptor = made
    flat.fill_(3)
    lent = Loans().lend(flat)
    child = os.fork()
    if not child:
        del lent
        os._exit(0)
    os.waitpid(child, 0)
    assert bool((lent == 3).all())
    del lent
    assert taken(descriptor) == 0


def test_what_cannot_be_given_back_is_lent_as_it_is() -> None:
    empty = torch.empty(0)
    assert Loans().lend(empty) is empty
    for dtype in (torch.bfloat16, torch.complex64):
        small = torch.ones(4, dtype=dtype)
        assert torch.equal(Loans().lend(small), small)


class Wide(nn.Module):
    """Gradients of 1.4 MB, in two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, WIDTH), nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(1)  # its own: members are threads, and share torch's
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())  # type: ignore[no-any-return]


def shared_bytes() -> int:
    """Resident in this process, which all members live in: they are threads."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0]) * 1024


def drop(how: str, trainer: Trainer) -> None:
    if how == "optimizer":
        trainer.optimizer.zero_grad()
    elif how == "model":
        trainer.model.zero_grad()
    else:
        for p in trainer.model.parameters():
            p.grad = None


@pytest.mark.parametrize("how", ["optimizer", "model", "by hand"])
def test_buckets_of_stage_one_take_nothing_without_gradients(how: str) -> None:
    def body(group: Group) -> list[int]:
        trainer = Trainer(group, Zero(stage=1), adamw, Wide()).train(3)
        group.barrier()
        before = shared_bytes()
        group.barrier()
        drop(how, trainer)
        group.barrier()
        after = shared_bytes()
        trainer.train(1)
        return [before, after]

    for before, after in together(2, body):
        assert before - after > 2 * 1_400_000  # of both members, each mapped by both or by one


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", [["here", "here"], ["a", "b"]])
def test_a_gradient_that_is_held_stays_until_the_next_pass(hosts: list[str]) -> None:
    def body(group: Group) -> bool:
        trainer = Trainer(group, Zero(stage=1), adamw, Wide()).train(2)
        held = trainer.model.last.weight.grad
        assert held is not None
        copied = held.clone()
        trainer.optimizer.zero_grad()
        gc.collect()
        return torch.equal(held, copied) and bool(copied.any())

    assert together(2, body, hosts=hosts) == [True, True]


def passes(group: Group, strategy: Strategy) -> list[torch.Tensor]:
    """Weights after steps whose gradients are dropped, zeroed, added up, or kept from one step to the next."""
    trainer = Trainer(group, strategy, adamw, Wide())
    trainer.train(2)
    trainer.optimizer.zero_grad(set_to_none=False)
    trainer.loss().backward()
    trainer.step()
    trainer.loss().backward()  # on top of the last one
    trainer.step()
    trainer.model.first.zero_grad()  # some of a bucket
    trainer.loss().backward()
    trainer.step()
    trainer.optimizer.zero_grad()
    trainer.model.first.requires_grad_(False)
    trainer.loss().backward()
    trainer.step()
    trainer.model.first.requires_grad_(True)
    return list(trainer.train(2).weights().values())


@pytest.mark.parametrize("hosts", [["here", "here"], ["a", "b"]])
def test_weights_are_those_of_all_reduce_however_gradients_are_dropped(hosts: list[str]) -> None:
    def body(group: Group) -> bool:
        whole, cut = passes(group, AllReduce()), passes(group, Zero(stage=1))
        return all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))

    assert together(2, body, hosts=hosts) == [True, True]
