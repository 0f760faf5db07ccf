"""The run as its user holds it: `run = paceline.join()`.

A run hands work to the rooms below and keeps none of it: the strategy makes replicas agree, the loader deals out
samples, the saver keeps checkpoints, the meter measures. Nothing below this file knows the run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.core.errors import ConfigError
from paceline.core.events import Events
from paceline.core.settings import Settings
from paceline.core.status import Status
from paceline.data import Loader
from paceline.data.uploads import Uploads
from paceline.parallel.cut import Cut, CutModel
from paceline.parallel.precise import Precise
from paceline.parallel.precision import make_precision
from paceline.server.dealing import Dealer
from paceline.strategies import Strategy, Tally, World
from paceline.strategies.server import Served
from paceline.strategies.sites import site_of
from paceline.train import metrics
from paceline.train.ending import Ending
from paceline.train.feeding import Feeding, refuse_given
from paceline.train.groups import SavedOptimizer
from paceline.train.left_out import left_out
from paceline.train.light import MODEL
from paceline.train.loop import Loop
from paceline.train.meter import Meter
from paceline.train.models import Models
from paceline.train.optimizer import adopt
from paceline.train.pool import LossOf, Pool, check
from paceline.train.saving import Saver, Stateful
from paceline.train.team import Team
from paceline.transport.group import Group
from paceline.transport.hub import HubGroup
from paceline.transport.wires import Wires

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


class Run(Models):
    """One member of a run."""

    def __init__(
        self,
        *,
        settings: Settings,
        directory: Path,
        device: torch.device,
        group: Group,
        strategy: Strategy,
        events: Events,
        status: Status,
        ending: Ending,
        wires: Wires | None = None,
        servers: Sequence[int] = (),
        dealer: Dealer | None = None,
        team: Team | None = None,
        labels: tuple[str, ...] = (),
        host: str = "",
        replaces: bool = False,
        late: bool = False,
        rate: Callable[[int], float] = lambda size: 1.0,
        lead: Callable[[bool], object] = lambda first: None,
    ) -> None:
        self.settings = settings
        self.dir = directory
        self.device = device
        self.seed = settings.seed
        self.labels = labels  # that this member was given
        self._precise = Precise(make_precision(settings.precision), device)
        self._dealer = dealer
        if dealer:
            dealer.rest = strategy.rest
        self._strategy = strategy
        self._cut = strategy if isinstance(strategy, Cut) else None  # where replicas are
        self._told = set()
        self._events = events
        self._status = status
        self._tally = Tally()
        self._world = World(
            group,
            status=status,
            tally=self._tally,
            check_finite=settings.check_finite,
            seed=settings.seed,
            tell=self._tell,
            tell_own=self._tell_own,
            wires=wires,
            servers=servers,
            limit_s=settings.wait_limit_s,
            replaces=replaces,
            late=late,
            site=site_of(labels, host),
        )
        self._world.directory = directory
        self._team = team
        self._saver = Saver(
            directory / "checkpoints",
            settings.checkpoint_keep,
            0.0 if replaces else settings.checkpoint_every_s,  # those who come and go meet between epochs only
            self._world,
            events,
            settings.seed,
            strategy,
        )
        self._saver.add("strategy", strategy)
        if settings.fresh:
            self._saver.clear()
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._feeding = Feeding(
            self._world,
            strategy,
            dealer=dealer,
            team=team,
            labels=labels,
            place=self._share,
            asked=lambda loader: self._loop.asked(loader),
            owed=lambda: self._loop.window.open or strategy.owes,
            warn=self._warn,
        )
        self._loaders = self._feeding.loaders
        self._world.leases = self._feeding.leases
        self._world.counted = dealer.counted if dealer else {}
        self._world.owed = lambda: self._loop.window.open or strategy.owes
        self._meter = Meter(events, status, size=self.size, readings=self._readings)
        self._ending = ending
        self._loop = Loop(
            world=self._world,
            strategy=strategy,
            saver=self._saver,
            meter=self._meter,
            events=events,
            status=status,
            loaders=self._loaders,
            optimizers=self._optimizers,
            seed=settings.seed,
            team=team,
            rate=rate,
            lead=lead,
            stragglers=settings.stragglers,
            precise=self._precise,
        )
        if team and (accounts := self._loop.accounts):
            ending.others = lambda: (accounts.rows({id for id, _ in team.seated}, team.left), accounts.seconds)
        self._began = False
        self._pool: Pool | None = None  # threads that train now

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def view(self) -> int:
        """The number of the present view; it rises each time that members come or go."""
        return self._team.view.number if self._team and self._team.view else 1

    @property
    def step(self) -> int:
        """Steps that the run has committed: what collectives in the loop should be tied to, where members come and
        go."""
        return self._meter.step

    @property
    def healing(self) -> bool:
        """Whether this member is a newcomer whose weights are still on their way: nothing that it draws counts, and
        they are there after its first step."""
        return self._loop.healing

    # ---- what the loop uses

    def optimizer(self, optimizer: O, model: torch.nn.Module) -> O:
        """Make this optimizer part of the run: the same object, whose steps the members now take together.

        All members call this with the same model; they start from the first member's weights.
        """
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"run.optimizer(optimizer, model): model is a {type(model).__name__}, not an nn.Module")
        self._precise.check(model)
        adopt(optimizer, self._loop)
        self._strategy.attach(model, optimizer, self._world)
        self._precise.adopt(model, optimizer)
        if not any(m is model for m in self._models):
            self._models.append(model)
            self._saver.add(f"{MODEL}{len(self._models) - 1}", CutModel(model, self._cut) if self._cut else model)
        self._optimizers.append(optimizer)
        self._saver.add(
            f"optimizer.{len(self._optimizers) - 1}",
            SavedOptimizer(optimizer, model, self._warn, self._precise.scaling(optimizer), self._cut),
        )
        self._status.set("ready")
        return optimizer

    def loader(self, dataset: Any, batch_size: int, **options: Any) -> Loader:
        """This member's share of a dataset, shuffled by (seed, epoch), prefetched, copied to the device, resumable.

        `batch_size` is per member. For the options see `paceline.data.Loader`.
        """
        seed = options.pop("seed", self.seed)
        loader = self._feeding.loader(dataset, batch_size, seed, self.device, options)
        self._saver.add(f"loader.{len(self._loaders) - 1}", loader)
        return loader

    def uploads(self, *, limit: int = 0, like: Any = None) -> Uploads:
        """What outsiders upload (`paceline.connect(...).upload`), as a dataset for `run.loader`; one member gets each.

        Args:
            limit: samples of an epoch, over all members; 0: as many as come until `finish_uploads()`.
            like: a sample whose form all must have: others are refused where they are uploaded.
        """
        return self._feeding.uploads(limit, like)

    def epochs(self, count: int) -> Iterator[int]:
        """Epoch numbers from where the last checkpoint ended up to `count`; checkpoints at the end of each."""
        if count < 0:
            raise ConfigError(f"run.epochs({count}): must not be negative")
        if self._began:
            raise ConfigError(
                "run.epochs was called before in this run, and a checkpoint knows one count of epochs: put all epochs "
                "into one loop, or end this run with run.close() and join another"
            )
        self._began = True
        late = self._world.late
        place = self._loop.begin()
        first = place[1] if place else 0
        resumed = None if late else place
        self._ending.start = self._events.emit(
            "start",
            size=self.size,
            name=self.settings.name,
            strategy=self.settings.strategy,
            script=self._ending.script,
            device=str(self.device),
            epochs=count,
            resumed_step=resumed[0] if resumed else None,
            resumed_epoch=resumed[1] if resumed else None,
            late=late,
        )
        self._loop.warn_of_untracked()
        for message in left_out(self._models, self._optimizers):
            self._warn(message)
        apart = isinstance(self._strategy, Served) and not self._strategy.sync and self.size > 1
        if (apart or self._world.replaces) and self.settings.checkpoint_every_s not in (
            0,
            Settings().checkpoint_every_s,
        ):
            self._warn(
                f"checkpoint_every_s={self.settings.checkpoint_every_s:g} has no effect: where workers go their own "
                "pace or are replaced, they meet between epochs only, and there is a checkpoint at the end of each. "
                "Make epochs shorter, with run.uploads(limit=...) for example"
            )
        if first >= count > 0:
            self._warn(f"all {count} epochs are done: nothing is left to train; raise their number, or use --fresh")
        yield from self._loop.epochs(first, count)
        self._saver.report(wait=True)
        self._status.set("after training")
        self._world.do(lambda group: self._ending.gather(group, self._totals()))

    def in_threads(
        self,
        threads: int,
        loss_of: LossOf,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        step: Callable[[], object] | None = None,
    ) -> None:
        """One pass over the loader by several threads of this member, with async, bounded, or in a run of one.

        Each thread calls `loss_of(model, batch)` with a replica of the model, and `backward()` of what it returns.
        `step` takes the place of `optimizer.step`: it is called by one thread at a time, with that thread's gradients
        in the model, and may clip them, step the optimizer, then a scheduler.
        """
        parts = ((model, self._models), (optimizer, self._optimizers), (loader, self._loaders))
        check(threads, model, optimizer, all(any(x is part for x in known) for part, known in parts))
        if self._pool:
            raise ConfigError("run.in_threads is under way already: call it from one thread, one after the other")
        self._pool = Pool(
            threads,
            loss_of,
            model,
            loader,
            step or optimizer.step,
            strategy=self._strategy,
            world=self._world,
            meter=self._meter,
            device=self.device,
        )
        try:
            self._loop.quiet = self._pool.quiet
            self._pool.run()
        finally:
            self._pool, self._loop.quiet = None, None

    def turn(self, gate: str) -> None:
        """With servers, go on with another gate: `run.turn("bounded(staleness=4)")`. All members call this, between two
        epochs."""
        if not isinstance(self._strategy, Served):
            raise ConfigError(
                f"run.turn({gate!r}): {self.settings.strategy} has no servers, whose gate could be turned: use "
                "--strategy sync, bounded or async"
            )
        self._strategy.turn(gate)
        if self._dealer:  # in sync without backups nobody may have more batches than the others
            self._dealer.deals = self._strategy.forgives or self._world.replaces
        self._events.emit("turn", gate=self._strategy.gate.words, step=self._meter.step)

    def log(self, **values: Any) -> None:
        """Note scalars of this step (numbers, tensors of one element): shown, written to events, in the report."""
        if not self._tally.idle:
            self._meter.log(values)
        if self._world.listen:
            self._world.listen(values)

    def track(self, **parts: Stateful) -> None:
        """Save these with every checkpoint: `run.track(scheduler=scheduler)`. Anything with a state_dict."""
        for name, part in parts.items():
            self._saver.add(name, part)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside keep their gradients here; the next one outside sends the sum."""
        before, self._world.accumulating = self._world.accumulating, True
        self._loop.window.open = True
        try:
            yield
        finally:
            self._world.accumulating = before

    def checkpoint(self) -> None:
        """Save now. All members call this, between two steps."""
        self._loop.save(self._meter.epoch)

    def evaluate(
        self, measure: metrics.Measure, dataset: Any, batch_size: int = 256, **options: Any
    ) -> dict[str, float]:
        """Means over a dataset of which each member sees its share, every sample once.

        `measure(*batch)` returns names and values: one per sample, or the mean of the batch. Models are in evaluation
        mode and no gradients are kept. Everyone gets the result; it is written to the events as metrics.
        """
        refuse_given("run.evaluate", options)
        for name in ("shuffle", "seed", "pad"):
            if name in options:
                raise ConfigError(
                    f"run.evaluate(..., {name}=...): every sample is visited once, in order and without fillers; leave "
                    f"{name} out, or loop over run.loader(..., {name}=...) under torch.no_grad()"
                )
        read, given = self._feeding.read_as(dataset, options)
        self._status.set("evaluating")
        with self._loop.waiting():
            self._strategy.together()

        def everyone(group: Group) -> dict[str, float]:
            here = group.ranks_here if isinstance(group, HubGroup) else range(group.size)
            rank, size = self._share() if self._cut else (here.index(group.rank), len(here))
            loader = Loader(
                read,
                batch_size=batch_size,
                rank=rank,
                size=size,
                device=self.device,
                seed=self.seed,
                shuffle=False,
                pad=False,
                agree=self._feeding.agree,
                **given,
            )
            batches = ((batch, loader.last_real) for batch in loader)
            return metrics.evaluate(
                group, measure, metrics.evenly(group, batches) if self._cut else batches, self._models
            )

        with self._strategy.showing():
            result = self._world.do(everyone)
        for name, value in result.items():
            self._loop.tell_metric(name, value)
        self._meter.start()
        self._status.set("training")
        return result

    def metric(self, name: str, value: float, weight: float = 1.0) -> float:
        """The mean of `value` over the members, weighted; written to the events."""
        sums = {name: (float(value) * weight, float(weight))}
        mean = self._world.do(lambda group: metrics.weighted_means(group, sums))[name]
        self._loop.tell_metric(name, mean)
        return mean

    def close(self) -> None:
        """End the run on this member: the last checkpoint, the summary and the report. Called at exit by itself."""
        self._ending.close(self._finish)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._ending.fail(error)
        self.close()

    # ---- inside

    def _share(self) -> tuple[int, int]:
        """Which share of the data is this member's, of how many: members that compute together have the same."""
        return self._cut.mesh.share(self.rank) if self._cut else (self.rank, self.size)

    def _tell(self, line: str) -> None:
        """What a strategy has to say to the person who watches, once and not by every member."""
        self._events.emit("told", line=line)
        if self.is_first:
            print(f"paceline: {line}", file=sys.stderr)

    def _tell_own(self, line: str) -> None:
        """The same, where the others do not say it."""
        self._events.emit("told", line=line)
        print(f"paceline: {line}", file=sys.stderr)

    def _readings(self) -> tuple[float, float, int, float]:
        data_s = sum(loader.wait_s for loader in self._loaders)
        drawn = self._tally.drawn * self._share()[1] / self.size  # samples that several work on count once
        return data_s, self._world.waited, self.group.sent_bytes + self._world.sent_bytes, drawn

    def _totals(self) -> dict[str, Any]:
        mine = {
            **self._meter.totals,
            **self._strategy.readings(),
            **self._precise.readings(),
            "rank": self.rank,
            "step": self._meter.step,
        }
        return self._loop.accounts.own(mine) if self._loop.accounts else mine

    def _finish(self) -> Mapping[str, Any]:
        self._ending.left_early = self._loop.under_way
        if self._team:
            if self._team.drained:
                self._saver.report(wait=True)  # who has left may be ended at any time
            early = "drained" if self._team.drained else "failed" if self._ending.failed else "left"
            self._team.leave(early if self._ending.failed or self._loop.under_way else "finished")
        for loader in self._loaders:  # worker processes must not outlive what they give their batches to
            loader.close()
        self._saver.close()
        totals = self._totals()
        self._strategy.close(failed=self._ending.failed)
        return {"step": self._meter.step, **totals}

    def _warn(self, message: str) -> None:
        self._events.emit("warning", message=message)
