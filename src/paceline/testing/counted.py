"""A model that counts its samples in its own weights, and a book of the steps that a member has committed.

`Counted` puts beside a model one more parameter with an entry for each sample, whose gradient is the sample's share in
the batch. What a step has changed there says which samples of all members it has counted, whoever wrote that down:

    seen ← seen - (1 / number of samples in the step)        for each sample that counted

The changes of one step add up to 1: more, and it was applied twice. It takes plain SGD for this parameter (`groups`).
`Book` writes a line for each committed step, which `Ledger` reads.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.strategies import Local
from paceline.testing.ledger import Begin, End, Line, Step, path

_TOGETHER = ("allreduce", "sync", "local")


class Counted(nn.Module):
    """A model, and how often each of `samples` samples has counted."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        super().__init__()
        self.model = model
        self.seen = nn.Parameter(torch.zeros(samples))

    def forward(self, *args: Any) -> Any:
        return self.model(*args)

    def count(self, numbers: Tensor) -> Tensor:
        """To be added to the loss, whose value it does not change."""
        term: Tensor = self.seen[numbers].mean()
        return term - term.detach()

    def groups(self, **options: Any) -> list[dict[str, Any]]:
        """For torch.optim.SGD: the model's parameters with `options`, the counts as they must be."""
        counts = {"params": [self.seen], "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}
        return [{"params": list(self.model.parameters()), **options}, counts]


class Book:
    """What one process writes of a run. `at` is a directory that outlives the run's faults, for all processes of it."""

    def __init__(self, run: Any, model: Counted, loader: Any, epochs: int, at: Path) -> None:
        self._run, self._model, self._loader = run, model, loader
        self.together = str(run.settings.strategy).split("(")[0] in _TOGETHER
        self.member = int(os.environ.get("PACELINE_RANK") or run.rank)
        at.mkdir(parents=True, exist_ok=True)
        file = path(at, self.member, os.getpid())
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._apart = run._strategy if isinstance(run._strategy, Local) else None
        self._held = -1  # rounds, where members train apart
        self._given: list[int] = []  # since the last one
        self._agreed = torch.zeros(0)  # counts after it
        rounds = self.together and loader.dealt
        self._write(Begin(samples=len(model.seen), epochs=epochs, together=self.together, rounds=rounds))

    def step(self, optimizer: torch.optim.Optimizer, numbers: Tensor) -> bool:
        """Take a step with a batch of these samples; write it down if it was committed. Whether it was.

        A member that was given the others' state meanwhile, and stands several steps further on, claims nothing.
        """
        if self._apart:
            self.look()
            self._given += numbers.tolist() if self._loader.last_real else []
            optimizer.step()
            return self.look()
        epoch, before = self._run_epoch, self._committed
        seen = self._model.seen.detach().clone()

        def note(*_: object) -> None:
            seen.copy_(self._model.seen.detach())  # a newcomer's weights may have come only now

        hook = optimizer.register_step_pre_hook(note)
        optimizer.step()
        hook.remove()
        if self._committed != before + 1:
            return False
        given = tuple(numbers.tolist()) if self._loader.last_real else ()
        counted, times = _counted(seen - self._model.seen.detach()) if self.together else (None, 1)
        line = self._line(self._committed, given, digest(self._model), epoch)
        self._write(msgspec.structs.replace(line, counted=counted, times=times))
        return True

    def look(self) -> bool:
        """Where members train apart: write down the round that was held since the last look. Whether there was one.

        Who has come, or was away, and stands several rounds further on claims nothing.
        """
        strategy = self._apart
        if strategy is None or strategy.rounds == self._held:
            return False
        with strategy.showing():
            agreed, weights = self._model.seen.detach().clone(), digest(self._model)
        claims = strategy.rounds == self._held + 1 and self._held >= 0
        if claims and not getattr(self._run._loop._replica, "brings", False):
            touched = (agreed - self._agreed).abs() > 1e-9
            line = self._line(strategy.rounds, tuple(self._given), weights)
            self._write(msgspec.structs.replace(line, counted=tuple(touched.nonzero().flatten().tolist())))
        self._held, self._agreed = strategy.rounds, agreed
        if not getattr(self._run._loop._replica, "brings", False):  # left out of that round, it brings them later
            self._given = []
        return claims

    def end(self) -> None:
        """The run has come to its end here. In the async strategies the counts are those of the last weights."""
        totals = None
        if not self.together:
            shares = -self._model.seen.detach() * self._loader.batch_size
            totals = tuple(int(n) for n in shares.round().tolist())
        self._write(End(weights=digest(self._model), totals=totals))
        os.close(self._file)

    def _line(self, step: int, given: tuple[int, ...], weights: str, epoch: int | None = None) -> Step:
        team = getattr(self._run, "_team", None)
        view = team.view if team else None
        return Step(
            step=step,
            epoch=self._run_epoch if epoch is None else epoch,
            samples=given,
            weights=weights,
            view=view.number if view else 0,
            members=tuple(member.id for member in view.members) if view else (),
            at=time.monotonic(),
        )

    @property
    def _committed(self) -> int:
        """Steps that count."""
        step = getattr(self._run, "step", None)
        return int(self._run._meter.step if step is None else step)

    @property
    def _run_epoch(self) -> int:
        return int(self._loader.epoch)

    def _write(self, line: Line) -> None:
        data = msgspec.json.encode(line) + b"\n"
        if os.write(self._file, data) != len(data):  # in one piece, so that a killed process leaves whole lines
            raise ConfigError("the ledger's disk is full: put it on another one than the run directory")


def digest(model: nn.Module) -> str:
    """Of the parameters, bit for bit; buffers such as those of batch norm are each member's own."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sha.update(name.encode())
        sha.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def _counted(change: Tensor) -> tuple[tuple[int, ...], int]:
    """The samples that a step has counted, each as often as it has, and how often the step was applied."""
    shares = change.cpu().double()
    shares[shares.abs() < 1e-9] = 0.0
    touched = shares.nonzero().flatten().tolist()
    if not touched:
        return (), 1
    least = min(float(shares[n]) for n in touched)
    numbers = [n for n in touched for _ in range(max(1, round(float(shares[n]) / least)))]
    return tuple(numbers), round(float(shares.sum()))


class Numbered(torch.utils.data.Dataset[tuple[Tensor, Tensor, int]]):
    """Points in the plane with labels, each with its own number."""

    def __init__(self, samples: int) -> None:
        dice = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, 8, generator=dice)
        self.y = (self.x[:, 0] * self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return self.x[number], self.y[number], number

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        return (self[n] for n in range(len(self)))
