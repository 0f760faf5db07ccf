"""Checkpoints of a run: what belongs in one, when it is due, and how members get theirs back.

A checkpoint is taken between two steps, when the user's loop asks for the next batch or ends an epoch, so everything
the loop body does after `optimizer.step()` (schedulers, averages) is in it. Models, optimizers, loaders and tracked
objects are the same on all members and come from the first one; random states, and what a strategy holds for one member
alone, are each member's own. The first member writes; whoever resumes, on any number of members, gets everything from
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.checkpoint import (
    CheckpointFailed,
    Checkpoints,
    Loaded,
    Written,
    newest_first,
    pack,
    random_states,
    seed_newcomer,
    set_random_states,
    unpack,
)
from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.events import Events
from paceline.parallel.cut import Cut
from paceline.strategies import Local, Strategy, World
from paceline.strategies.round_state import learnt_apart, tell_left_out
from paceline.transport.group import Group, solo


class Stateful(Protocol):
    """Anything that torch-style code saves."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Saver:
    """Collects what is to be saved under names, and saves and restores it with all members together."""

    def __init__(
        self,
        directory: Path,
        keep: int,
        every_s: float,
        world: World,
        events: Events,
        seed: int,
        strategy: Strategy,
    ) -> None:
        self._strategy = strategy
        self._world = world
        self._directory = directory
        self._keep = keep
        self._events = events
        self._seed = seed
        self._every_s = every_s
        self.parts: dict[str, Stateful] = {}
        self._last_at = time.monotonic()
        self._pending: Future[Written] | None = None
        self._shelf: Checkpoints | None = None
        self.enabled = keep > 0
        self._each: list[list[Any]] = []  # own states that the first member has loaded for all, by rank
        self.state_of: Callable[[Stateful], dict[str, Any]] = lambda part: part.state_dict()

    @property
    def _group(self) -> Group:
        return self._world.group

    @property
    def _checkpoints(self) -> Checkpoints | None:
        """The first member's; another one may become the first."""
        if self._shelf is None and self.enabled and self._group.rank == 0:
            self._shelf = Checkpoints(self._directory, self._keep)
        return self._shelf if self._group.rank == 0 else None

    def add(self, name: str, part: Stateful) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(part, method, None)):
                raise ConfigError(
                    f"run.track({name}=...): a {type(part).__name__} has no {method}(), so it cannot be saved"
                )
        if name in self.parts and self.parts[name] is not part:
            raise ConfigError(f"run.track({name}=...): this name is taken; choose another")
        self.parts[name] = part

    def holds(self, kind: type) -> bool:
        return any(isinstance(part, kind) for part in self.parts.values())

    @property
    def due(self) -> bool:
        """Whether the first member wants a checkpoint now; the others follow it."""
        if not self.enabled or self._group.rank or not self._every_s:
            return False
        return time.monotonic() - self._last_at >= self._every_s

    @property
    def newest(self) -> int:
        """The step of the checkpoint that was written last, by any member; -1: there is none that can be read here."""
        written = newest_first(self._directory) if self.enabled else []
        return written[0][1].step if written else -1

    def save(self, step: int, epoch: int, epoch_step: int, versions: Sequence[int] = ()) -> None:
        """All members together, between two steps. Returns when the state is copied; it is written behind.

        `versions` are those of the servers' shards, for who reads on what a lost one had beyond them.
        """
        self.report()
        self._last_at = time.monotonic()
        mine = {"random": random_states(), "strategy": self._strategy.own_state()}
        own = self._world.do(lambda group: group.gather(_bytes_tensor(pack(mine))))
        if self._checkpoints is None or own is None:
            return
        shared = {name: self.state_of(part) for name, part in self.parts.items()}
        try:
            snapshot = self._checkpoints.snapshot(shared, self._frozen())  # waits for the write before it
            self.report()
            self._pending = self._checkpoints.write(
                step,
                snapshot,
                [t.numpy().tobytes() for t in own],
                {"epoch": epoch, "epoch_step": epoch_step, "size": self._group.size, "versions": list(versions)},
            )
        except CheckpointFailed as error:
            self._events.emit("checkpoint_failed", step=step, reason=str(error))
        self._last_at = time.monotonic()

    def _frozen(self) -> set[int]:
        """Where parameters lie that are not trained."""
        models = [part for part in self.parts.values() if isinstance(part, torch.nn.Module)]
        return {p.data_ptr() for model in models for p in model.parameters() if not p.requires_grad}

    def report(self, *, wait: bool = False) -> None:
        """Tell what became of the last checkpoint, if it is known."""
        if self._pending is None or not (wait or self._pending.done()):
            return
        pending, self._pending = self._pending, None
        try:
            written = pending.result(600)
        except (CheckpointFailed, TimeoutError) as error:
            self._events.emit("checkpoint_failed", reason=str(error))
            return
        self._events.emit(
            "checkpoint",
            step=written.step,
            path=str(written.path),
            seconds=written.seconds,
            bytes=written.bytes,
        )
        if written.note:
            self._events.emit("warning", message=written.note)

    def clear(self) -> None:
        """Start over: drop the checkpoints of an earlier run of this name."""
        if self._checkpoints:
            self._checkpoints.clear()

    def resume_alone(self, *, each: bool = False) -> tuple[int, int, int] | None:
        """As `resume`, by the first member for all: the others get from it what it has then; and, with `each`, what is
        their own, by `hand_out`."""
        group, self._world.group = self._world.group, solo()
        self._each = [[] for _ in range(group.size if each else 1)]
        try:
            return self.resume()
        finally:
            self._world.group = group

    def hand_out(self, group: Group) -> list[dict[str, Any]]:
        """By all, after `resume_alone`: what is this member's own, where it is not the first."""
        each, size = self._each, group.size
        if group.rank == 0:
            others = [each[r] if r < len(each) else [] for r in range(1, size)]
            gone = [own for states in each[size:] for own in states]  # of those who have been lost since
            if not others:
                return [own["strategy"] for own in each[0] + gone] if gone else []
            others[-1] = others[-1] + gone
            group.scatter([_bytes_tensor(pack(states)) for states in ([], *others)])
            return []
        states: list[dict[str, Any]] = unpack(group.scatter(None).numpy().data)
        if states:
            set_random_states(states[0]["random"])
        return [state["strategy"] for state in states]

    def resume(self) -> tuple[int, int, int] | None:
        """Restore the newest good checkpoint on all members; its step, epoch and that epoch's first step, or None."""
        if not self.enabled:
            return None
        loaded: Loaded | None = None
        if self._checkpoints:

            def refused(reason: str) -> None:
                self._events.emit("warning", message=reason)

            loaded = self._checkpoints.load_latest(refused)
        head = b"" if loaded is None else pack({"step": loaded.step, **loaded.meta})
        head = self._group.exchange(head)[0]
        if not head:
            return None
        place = unpack(head)
        shared = self._share(loaded.shared if loaded else None)
        self.restore(shared)
        own = [unpack(data.numpy().data) for data in unpack(self._own(loaded))]
        if len(self._each) > 1:
            self._each = [own[r :: len(self._each)] for r in range(len(self._each))]
            own = self._each[0]
        mine = [state["strategy"] for state in own]
        if not isinstance(self._strategy, Local | Cut) and any(learnt_apart(state) for state in mine):
            tell_left_out(self._world)
        self._strategy.load_own_state(mine)
        if own:
            set_random_states(own[0]["random"])
        else:  # a member that the saved run did not have
            seed_newcomer(self._seed, place["step"], self._group.rank)
        return int(place["step"]), int(place["epoch"]), int(place["epoch_step"])

    def close(self) -> None:
        self.report(wait=True)
        if self._shelf:
            self._shelf.close()

    def _share(self, shared: Any) -> Any:
        if self._group.size == 1:
            return shared
        data = pack(shared) if self._group.rank == 0 else b""
        length = torch.tensor([len(data)])
        self._group.broadcast(length)
        flat = _bytes_tensor(data) if data else torch.empty(int(length), dtype=torch.uint8)
        self._group.broadcast(flat)
        return shared if self._group.rank == 0 else unpack(flat.numpy().data)

    def _own(self, loaded: Loaded | None) -> bytes:
        if self._group.rank == 0:
            assert loaded is not None
            size = self._group.size  # of members that are gone, each takes over some
            mine = self._group.scatter(
                [_bytes_tensor(pack([_bytes_tensor(own) for own in loaded.own[r::size]])) for r in range(size)]
            )
        else:
            mine = self._group.scatter(None)
        return mine.numpy().tobytes()

    def restore(self, shared: dict[str, Any], put: Callable[[Stateful, dict[str, Any]], object] | None = None) -> None:
        """Put saved parts back; `put` does so with each."""
        for name in [*shared, *self.parts]:
            if (name in shared) != (name in self.parts):
                where = "the checkpoint" if name in shared else "this script"
                raise CheckpointError(
                    f"{name!r} is in {where} only: the script has changed since the checkpoint was written, or makes "
                    "it within the loop over run.epochs, where it is not there yet. Make and track everything before "
                    "the loop, bring back what is gone, or start over with --fresh or another --name"
                )
        for name, part in self.parts.items():
            try:
                if put:
                    put(part, shared[name])
                else:
                    part.load_state_dict(shared[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"{name!r} does not fit its checkpoint: {error}. Start over with --fresh or another --name"
                ) from None


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
