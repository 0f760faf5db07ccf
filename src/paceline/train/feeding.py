"""A run's loaders: how they are made, and what the rest of the run asks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.data import Loader, rows
from paceline.data.sampler import Deal
from paceline.data.uploads import Uploads
from paceline.server.dealing import Dealer, DealsFor
from paceline.server.outside.taking import Taker
from paceline.strategies import Local, Strategy, World
from paceline.train import again
from paceline.train.team import Team


class Feeding:
    """The loaders of one member.

    Args:
        labels: that this member has.
        place: its rank and the number of members, now.
        asked: called when the user asks a loader for a batch.
        owed: whether gradients are kept for a push to come.
        warn: gets what the user should know.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        *,
        dealer: Dealer | None,
        team: Team | None,
        labels: tuple[str, ...],
        place: Callable[[], tuple[int, int]],
        asked: Callable[[Loader], None],
        owed: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        self.loaders: list[Loader] = []
        self._from_ray: list[tuple[Any, Any]] = []  # datasets of Ray Data, and what stands for each
        self._world = world
        self._strategy = strategy
        self._dealer = dealer
        self._team = team
        self._labels = labels
        self._place = place
        self._asked = asked
        self._owed = owed
        self._warn = warn

    def loader(
        self, dataset: Any, batch_size: int, seed: int, device: torch.device, options: Mapping[str, Any]
    ) -> Loader:
        """One more."""
        refuse_given("run.loader", options)
        dataset, options = self.read_as(dataset, options)
        if self._team or self._world.replaces:
            again.check(dataset, options.get("partition"))
        if self._team:
            again.check_unbound(options)
            if isinstance(self._strategy, Local):
                again.check_length(dataset)
        rank, size = self._place()
        loader = Loader(
            dataset,
            batch_size=batch_size,
            rank=rank,
            size=size,
            device=device,
            seed=seed,
            draw=self._drawn if options.get("pad", True) else None,  # evaluation weighs nothing
            before=lambda: self._asked(loader),
            agree=self.agree,
            deal=self._deals(len(self.loaders)),
            labels=self._all_labels(),
            owed=self._owed,
            on_note=self._warn,
            **options,
        )
        if self._world.replaces:
            again.check_dealt(loader)
        self.loaders.append(loader)
        return loader

    def read_as(self, dataset: Any, options: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """What a loader reads, with its options: another dataset where this one is Ray's."""
        if not rows.is_dataset(dataset) and not rows.is_share(dataset):
            return dataset, options
        known = [read for given, read in self._from_ray if given is dataset]
        if known and not rows.is_share(dataset):
            return known[0], options
        read, options = rows.taken(dataset, options, len(self._from_ray), self._place()[1])
        self._from_ray.append((dataset, read))
        return read, options

    def uploads(self, limit: int, like: Any) -> Uploads:
        """What outsiders upload; see `Run.uploads`."""
        wires, servers = self._world.wires, self._world.servers
        if wires is None:
            raise ConfigError(
                "run.uploads(): a run of one process has no desk; start it with paceline run -n 2 or more"
            )
        if limit < 0:
            raise ConfigError(f"run.uploads(limit={limit}): must not be negative")
        size = 1 if self._dealer else self._place()[1]
        desk = servers[0] if servers else 0
        return Uploads(Taker(wires, desk, size=size, limit=limit, like=like, rest=self._strategy.rest))

    def leases(self) -> dict[str, tuple[int, ...]]:
        """The batches that a push of now has the gradients of, by course."""
        return {course: numbers for loader in self.loaders for course, numbers in loader.leases().items()}

    def agree(self, value: int) -> list[int]:
        """Each member's number."""
        return [int(t) for t in self._world.group.all_gather(torch.tensor([value]))]

    def _drawn(self, real: int, nominal: int) -> None:
        if torch.is_grad_enabled():  # a loop that only looks at a data set must not weigh in
            self._strategy.wake()
            self._world.tally.add(real, nominal)
        elif real != nominal:
            self._world.tally.passed_over = True

    def _deals(self, loader: int) -> Deal | None:
        return DealsFor(self._dealer, str(loader)) if self._dealer else None

    def _all_labels(self) -> tuple[str, ...]:
        """Those that some member has, where samples can be bound to them: with servers, who know all from the start."""
        if self._world.wires is None or self._dealer is None:
            return self._labels
        workers = self._world.wires.view.members[: self._place()[1]]
        return tuple(dict.fromkeys(label for member in workers for label in member.labels))


def refuse_given(call: str, options: Mapping[str, Any]) -> None:
    """Refuse options that the run gives itself."""
    for name in ("rank", "size", "device", "labels"):
        if name in options:
            raise ConfigError(f"{call}(..., {name}=...): the run gives each loader its own {name}; leave it out")
