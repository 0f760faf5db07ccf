"""Swaps in a live model: pointers change, compiled code sees it, and what does not fit is refused."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.serve.places import places_of
from paceline.serve.shelf import Shelf, Version
from paceline.serve.swap import Swap


class Net(nn.Module):
    """Tied and shared tensors, buffers of both kinds, a parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.again = self.inner  # the same module
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.inner.weight  # the same parameter
        self.shared = nn.Parameter(self.inner.bias.data)  # another one, on the same memory
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.conv = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("own", torch.full((2,), 5.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.tied(self.inner(x)) * self.mask) + self.shared
        return y @ self.turned.t() + self.conv(torch.ones(1, 1, 3, 3)).sum() + self.own.sum()


def state(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Other values for all of its places."""
    made = torch.Generator().manual_seed(seed)
    found = {}
    for name, place in places_of(model).items():
        like = place.holders[0]
        new = torch.rand(like.shape, generator=made) if like.is_floating_point() else torch.tensor(seed)
        found[name] = new.to(like.dtype)
    return found


def put(shelf: Shelf, number: int, tensors: dict[str, torch.Tensor], base: int | None = None) -> None:
    shelf.put(Version(number=number, source_version=number, made_at=0.0), tensors, base)
    shelf.serve(number)


def until(ready: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def swapping(model: nn.Module, shelf: Shelf, **how: bool) -> Iterator[Swap]:
    swap = Swap(model, shelf, **how)
    try:
        yield swap
    finally:
        swap.close()


def loaded(model: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """By torch's own way."""
    for name, place in places_of(model).items():
        for holder in place.holders:
            holder.data = tensors[name].clone()
    return model


@pytest.mark.parametrize("into", [False, True], ids=["pointers", "into"])
def test_a_version_is_in_the_model_and_computes_what_it_should(tmp_path: Path, into: bool) -> None:
    shelf, model, x = Shelf(tmp_path), Net().eval(), torch.randn(5, 4)
    assert "own" not in places_of(model)
    assert len(places_of(model)["shared"].holders) == 2
    strides = {name: place.holders[0].stride() for name, place in places_of(model).items()}
    with swapping(model, shelf, into=into) as swap, torch.inference_mode():
        assert swap.install() == 0
        for number in (1, 2, 3):
            new = state(model, number)
            put(shelf, number, new)
            addresses = [p.data_ptr() for p in model.parameters()]
            until(lambda number=number: swap.install() == number)  # type: ignore[misc]
            assert [p.data_ptr() for p in model.parameters()] == addresses or not into
            assert torch.equal(model.tied.weight, new["inner.weight"])
            assert model.tied.weight is model.inner.weight
            assert torch.equal(model.inner.bias, new["shared"])
            assert torch.equal(model.norm.num_batches_tracked, torch.tensor(number))
            assert {n: place.holders[0].stride() for n, place in places_of(model).items()} == strides
            assert torch.equal(model(x), loaded(Net().eval(), new)(x))
    assert all(p.requires_grad for p in model.parameters())


def test_only_what_changed_is_read_and_old_memory_is_let_go_elsewhere(tmp_path: Path) -> None:
    shelf, model = Shelf(tmp_path), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with swapping(model, shelf) as swap:
        put(shelf, 1, state(model, 1))
        until(lambda: swap.install() == 1)
        before = {name: p.data_ptr() for name, p in model.named_parameters()}
        put(shelf, 2, {"1.weight": torch.zeros(3, 3)}, base=1)
        until(lambda: swap.install() == 2)
        after = {name: p.data_ptr() for name, p in model.named_parameters()}
        assert [name for name in before if before[name] != after[name]] == ["1.weight"]
        until(lambda: not swap._spent)  # by the other thread


def test_versions_that_nobody_asked_for_are_passed_over_and_nothing_of_them_is_lost(tmp_path: Path) -> None:
    """Several are loaded before a batch comes: what only an earlier one changed must be in the model too."""
    shelf, model = Shelf(tmp_path), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with swapping(model, shelf) as swap:
        put(shelf, 1, state(model, 1))
        until(lambda: swap._loaded == 1)
        put(shelf, 2, {"0.weight": torch.full((3, 3), 2.0)}, base=1)
        until(lambda: swap._loaded == 2)
        put(shelf, 3, {"1.weight": torch.full((3, 3), 3.0)}, base=2)
        until(lambda: swap._loaded == 3)
        assert swap.install() == 3
        read = shelf.read(3)
        assert all(torch.equal(p, read[name]) for name, p in model.named_parameters())
        shelf.serve(1)  # rolled back
        until(lambda: swap.install() == 1)
        read = shelf.read(1)
        assert all(torch.equal(p, read[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t | {"0.weight": torch.zeros(2, 3)}, "'0.weight' is 2x3, in the model it is 3x3"),
        (lambda t: t | {"0.weight": torch.zeros(3, 3).double()}, "'0.weight' is torch.float64, in the model"),
        (lambda t: {k: v for k, v in t.items() if k != "1.bias"}, "'1.bias' is missing"),
        (lambda t: t | {"1.bais": torch.zeros(3)}, "'1.bais' is not in the model: did you mean '1.bias'"),
        (lambda t: t | {"1.bias": torch.tensor([0.0, float("nan"), 0.0])}, "'1.bias' has values that are not finite"),
        (lambda t: t | {"1.bias": torch.tensor([3e38, 3e38, float("inf")])}, "not finite"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_old_one_stays(
    tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], reason: str
) -> None:
    shelf, model = Shelf(tmp_path), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    good = state(model, 1)
    with swapping(model, shelf) as swap:
        put(shelf, 1, good)
        until(lambda: swap.install() == 1)
        put(shelf, 2, spoil(state(model, 2)))
        until(lambda: bool(swap.refused))
        assert reason in swap.refused
        assert "version 2" in swap.refused
        assert swap.install() == 1
        assert all(torch.equal(p, good[name]) for name, p in model.named_parameters())
        put(shelf, 3, state(model, 3))
        until(lambda: swap.install() == 3)
        assert not swap.refused


def test_a_large_sum_is_not_taken_for_infinity(tmp_path: Path) -> None:
    shelf, model = Shelf(tmp_path), nn.Linear(2, 1, bias=False)
    with swapping(model, shelf) as swap:
        put(shelf, 1, {"weight": torch.full((1, 2), 3e38)})
        until(lambda: swap.install() == 1)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    shelf, model = Shelf(tmp_path), nn.Linear(2, 2)
    shelf.put(Version(number=1, source_version=1, made_at=0.0), state(model, 1))
    path = tmp_path / "tensors-00000001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    shelf.serve(1)
    with swapping(model, shelf) as swap:
        until(lambda: bool(swap.refused))
        assert swap.install() == 0
        assert "tensors-00000001.safetensors" in swap.refused


def test_a_model_in_fewer_bits_takes_versions_in_more(tmp_path: Path) -> None:
    shelf, model = Shelf(tmp_path), nn.Linear(2, 2)
    new = state(model, 1)
    put(shelf, 1, new)
    with swapping(model.bfloat16(), shelf, cast=True) as swap:
        until(lambda: swap.install() == 1)
        assert torch.equal(model.weight, new["weight"].bfloat16())


@pytest.mark.slow
@pytest.mark.timeout(900)  # a compiler of C++ runs
@pytest.mark.parametrize("part", [False, True], ids=["whole", "a part"])
def test_compiled_code_computes_with_the_new_version_without_compiling_again(tmp_path: Path, part: bool) -> None:
    shelf, x = Shelf(tmp_path), torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    if part:
        model[0] = torch.compile(model[0])  # type: ignore[call-overload]
        compiled = model
    else:
        compiled = torch.compile(model)
    assert places_of(compiled).keys() == places_of(plain).keys()
    torch._dynamo.utils.counters.clear()
    with swapping(compiled, shelf) as swap, torch.inference_mode():
        compiled(x)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for number in (1, 2, 3):
            put(shelf, number, state(plain, number))
            until(lambda number=number: swap.install() == number)  # type: ignore[misc]
            assert torch.allclose(compiled(x), loaded(plain, shelf.read(number))(x), atol=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_every_batch_is_of_one_version_while_versions_come(tmp_path: Path) -> None:
    """All tensors of a version have its number as their value: a batch that mixes two would show it."""
    shelf, model = Shelf(tmp_path, keep=3), nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    stop = threading.Event()
    names = list(places_of(model))

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            put(shelf, number, {n: torch.full_like(p, float(number)) for n, p in zip(names, model.parameters())})
            shelf.prune()

    writer = threading.Thread(target=write, daemon=True)
    with swapping(model, shelf) as swap:
        writer.start()
        seen: set[int] = set()
        deadline = time.monotonic() + 60
        while len(seen) < 8 and time.monotonic() < deadline:
            number = swap.install()
            values = {float(p.detach().view(-1)[0]) for p in model.parameters()}
            assert number == 0 or values == {float(number)}
            seen.add(number)
        stop.set()
        writer.join(20)
        assert len(seen) >= 8
        assert not swap.refused
