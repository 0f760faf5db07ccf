"""The server strategies: gradients go to servers that hold the parameters, and weights come back.

    end of backward  → gradients stay here: what users clip and log is this worker's own
    step()           → pushed, with the learning rate of the moment; the servers apply them; the next weights are
                       installed before step() returns. Sync and bounded wait here, and only here
    together         → at the end of an epoch, before an evaluation and a checkpoint, all members pull the same weights,
                       and take over the first one's buffers

One strategy, three gates (`server.gates`). The optimizer's state lives with the parameters; for a checkpoint the first
member fetches it (`fetched`), and it goes back when a run is resumed, on any number of servers. In a run of one there
are no servers, and the optimizer steps as it always did.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.server.client import Client
from paceline.server.connection import connect, pair
from paceline.server.counting import Batch, batches_of, is_one
from paceline.server.gates import Apart, Gate, Together, Within, make_gate
from paceline.server.messages import Rule
from paceline.server.packing import servable
from paceline.server.placement import Tensor
from paceline.server.pushes import readings_of
from paceline.server.rounds import agree
from paceline.server.service import Service
from paceline.staleness import Chain, Correction, Stage, make_corrections
from paceline.strategies.fetched import Fetched
from paceline.strategies.front import Front, front_of
from paceline.strategies.held import Held
from paceline.strategies.options import optimizer_name, options_of
from paceline.strategies.replicas import has_thawed, is_trained, make_equal, names_of
from paceline.strategies.strategy import World
from paceline.transport.hub import HubGroup

# These look at each element by itself, so a tensor may be cut.
_ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    "paceline.Adagrad", "paceline.DelayedNesterov",
}  # fmt: skip
_LOOK_S = 1.0


class Served:
    """What the three have in common."""

    def __init__(
        self, gate: Gate, correct: Correction | str | Sequence[Correction | str] | None, *, per_host: bool = False
    ) -> None:
        self.gate = gate
        self.codec = ""  # in words; see `paceline.server.packing`
        self._correct = make_corrections(correct)
        self.options: dict[str, Any] = {"correct": self._correct.words if self._correct else None}
        self._per_host = per_host
        self._front: Front | None = None  # this host's workers, where they push as one
        self._attached = False
        self._world: World | None = None  # None in a run of one too
        self._met = False
        self._num_workers = 0  # that push
        self._client: Client | None = None  # None on workers for which another one pushes
        self._service: Service | None = None  # the shard that lives with this worker
        self._models: list[torch.nn.Module] = []
        self._pairs: dict[int, tuple[torch.nn.Module, torch.optim.Optimizer]] = {}  # by id of the optimizer
        self._tables: dict[int, list[Held]] = {}  # by id of the optimizer
        self._owned: set[int] = set()  # ids of parameters
        self._wishes = 0
        self._pushed = 0.0  # samples of which servers have been told
        self._rests = False  # the servers have been told that nobody is to wait for this member
        self._behind = False  # it has come late, and its weights are of then
        self._drawn: list[Batch] = []  # that a push of now is made of; some may have been said to be done before it
        self._fetched = Fetched()  # of the servers' state, for a checkpoint

    def take(self, codec: str) -> None:
        """Push by this codec, in words; behind back= is the one in which weights come back."""
        codec = "" if codec == "none" else codec
        back = servable(codec).back if codec else None
        parts = self._correct.parts if isinstance(self._correct, Chain) else (self._correct,)
        for part in parts if back else ():
            if part and part.reads and part.stage != Stage.GATHER:
                raise ConfigError(
                    f"codec {codec!r}: {part.words} goes by the weights that each worker was sent, and with back= a "
                    "worker has them only nearly: leave out one of the two"
                )
        self.codec = codec

    # ---- the contract

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._attached = True
        if world.group.size == 1 and not world.servers:
            return
        self._world = world
        if not self._met:
            self._meet(world)
        self._pairs[id(optimizer)] = model, optimizer
        new = not any(m is model for m in self._models)
        if new:
            self._models.append(model)
            make_equal(world.group, {}, dict(model.named_buffers()))
        self._adopt(model, optimizer)

    def regroup(self) -> None:
        raise ConfigError("a run with servers cannot change its group of workers")

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._tables:
            self._adopt(*self._pairs[id(optimizer)])

    def reduced(self) -> None:
        pass

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        pass  # the servers have

    def showing(self) -> AbstractContextManager[None]:
        return nullcontext()  # `together` has made all equal

    def finish(self, optimizer: torch.optim.Optimizer) -> bool:
        """Push this optimizer's gradients and install the next weights; the servers have stepped."""
        world, held = self._world, self._tables.get(id(optimizer))
        if world is None or held is None:
            return True
        if has_thawed(optimizer, self._owned):
            self._adopt(*self._pairs[id(optimizer)])
        known = {id(p) for each in held for p in each.parameters}
        if not known:
            raise ConfigError(
                "optimizer.step(): all parameters of this optimizer are frozen, so there is nothing to push. Freeze "
                "fewer of them, or leave this step out"
            )
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if is_trained(p) and id(p) not in known:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {tuple(p.shape)} that the servers do not: it was put "
                    "into param_groups by hand. Use optimizer.add_param_group"
                )
        weight, doubt = (world.passing.weight, "") if world.passing else world.tally.take()
        if doubt:
            world.tell(doubt)
        self._push(optimizer, weight)
        return False

    def _push(self, optimizer: torch.optim.Optimizer, weight: float) -> None:
        """Push what `p.grad` holds, and install the next weights."""
        world, held = self._world, self._tables[id(optimizer)]
        assert world is not None
        self._fetched.forget()
        options = options_of(optimizer)
        leases = world.passing.leases if world.passing else world.leases()
        samples, self._pushed = world.tally.drawn - self._pushed, world.tally.drawn
        began = time.monotonic()
        counted = world.counted
        if not self._is_alone(leases):
            self._end_turn(optimizer)
            counted = counted if world.passing or set(self._drawn) <= set(batches_of(leases)) else {}
        for each in held:
            wish = self.sync and world.wish
            each.push(options[: each.groups], weight, wish, world.passing, leases, counted, samples)
            samples = 0.0
        world.waited_s += time.monotonic() - began
        world.sent_bytes = self._client.sent_bytes if self._client else 0
        seen = max(each.wishes for each in held)
        world.granted = world.granted or seen > self._wishes
        self._wishes = max(self._wishes, seen)

    def cleared(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        for each in self._tables.get(id(optimizer), ()):
            each.redone.cleared()

    def _end_turn(self, optimizer: torch.optim.Optimizer) -> None:
        """What a batch among others adds to a push is taken back where servers have it already."""
        for each in self._tables[id(optimizer)]:
            each.redone.end()

    def _is_alone(self, leases: Mapping[str, Sequence[int]]) -> bool:
        """Whether a push is made of one batch."""
        assert self._world is not None
        return is_one(leases) and (self._world.passing is not None or len(self._drawn) <= 1)

    def _draw(self) -> None:
        """A batch was drawn, and its turn begins."""
        world = self._world
        if world is None:
            return
        kept = world.owed()
        before = self._drawn if kept else []
        new = [batch for batch in batches_of(world.leases()) if batch not in before]
        self._drawn = [*before, *new]
        joined = [each.draws(new, world.counted, kept=kept) for each in self._all()]
        if any(joined) or (len(new) > 1 and any(batch in world.counted for batch in new)):
            world.tell(
                "a batch that a lost member had begun is in one loss with another one, which is left out where the "
                "first counts already"
            )

    def reading(self) -> dict[int, Sequence[int]]:
        if self._world is not None and self.sync:
            raise ConfigError(
                "sync closes a round with one push of each worker, so a worker's threads would have to take turns: use "
                "--strategy async or bounded, or several workers in place of threads"
            )
        return {each.table.number: each.table.versions for each in self._all() if each.table}

    def together(self, *, keep: bool = False, end: bool = False) -> None:
        """All members are between two steps: everyone gets the servers' weights and the first member's buffers."""
        world = self._world
        if world is None:
            return
        self.rest()
        world.group.barrier()  # all pushes are in
        for each in self._all():
            each.pull()
        self._rests = self._behind = False
        for model in self._models:
            make_equal(world.group, {}, dict(model.named_buffers()))
        if keep and world.group.rank == 0:
            self._fetched.fetch(self._all())
        world.group.barrier()  # nobody pushes before all have pulled

    def rest(self) -> None:
        """This member has no work: nobody is to wait for its pushes."""
        self._rests = True
        for each in self._all():
            if each.table:
                each.table.rest()

    def wake(self) -> None:
        """This member has work again: where its gradients must be of the weights of now, it gets these before."""
        self._catch_up()
        self._draw()

    def _catch_up(self) -> None:
        world = self._world
        if not self._rests or world is None or not (self._behind or (self.sync and world.replaces)):
            return
        self._rests = self._behind = False
        for each in self._all():
            if each.table:
                each.table.catch_up()

    def turn(self, gate: str | Gate) -> None:
        """Go on with another gate, such as "bounded(staleness=4)"; all members call this, between two epochs."""
        gate = make_gate(gate) if isinstance(gate, str) else gate
        if not self._attached:
            raise ConfigError(
                f"turn({gate.words!r}): this strategy is not that of a run with an optimizer: another one was asked "
                "for on the command line, or run.optimizer was not called yet. Use run.turn(...), after run.optimizer"
            )
        world = self._world
        self._check(gate, world)
        self.gate = gate
        if world is None:
            return
        world.group.barrier()
        if world.group.leads if isinstance(world.group, HubGroup) else world.group.rank == 0:
            for each in self._all():
                if each.table:
                    each.table.turn(self.gate.words)
                    each.table.pull()  # when it is back, the servers have turned
        world.group.barrier()
        for each in self._all():
            each.pull()  # corrections rest in sync, and begin anew behind it: so do the weights that they send
        world.group.barrier()

    @property
    def versions(self) -> list[int]:
        """Of each server, the highest of its shards: what this member has pulled last."""
        return [max(versions) for versions in zip(*(each.table.versions for each in self._all() if each.table))]

    @property
    def forgives(self) -> bool:
        """Whether the run goes on when a worker is lost."""
        return not isinstance(self.gate, Together) or self.gate.backups > 0

    @property
    def owes(self) -> bool:
        return False

    @property
    def sync(self) -> bool:
        return isinstance(self.gate, Together)

    def readings(self) -> dict[str, Any]:
        tables = [each.table for each in self._all() if each.table]
        return readings_of(tables, self.codec, self._client.sent_bytes if self._client else 0) if tables else {}

    def state_dict(self) -> dict[str, Any]:
        correct = self._correct.words if self._correct else ""
        return {"gate": self.gate.words, "correct": correct, "corrections": self._fetched.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Another gate than before is the user's right, and so are other corrections, which begin anew."""
        words, before = self._correct.words if self._correct else "", state.get("correct", "")
        self._fetched.kept = state.get("corrections", []) if words == before else []
        if words != before and before and self._world:
            self._world.tell(f"what {before} has learnt is left out: this run corrects by {words or 'nothing'}")

    def own_state(self) -> dict[str, Any]:
        unsaid = [each.table.unsaid() if each.table else {} for each in self._all()]
        return {"unsaid": unsaid} if self.codec else {}

    def load_own_state(self, states: Sequence[dict[str, Any]]) -> None:
        """A run was resumed, and models and optimizers are as they were saved: so shall the servers be."""
        world = self._world
        if world is None:
            self._fetched.kept = []
            return
        for model, optimizer in self._pairs.values():
            if has_thawed(optimizer, self._owned):  # the checkpoint says what is trained
                self._adopt(model, optimizer)
        self._fetched.store(self._all(), states, first=world.group.rank == 0)
        world.group.barrier()
        for each in self._all():
            each.pull()
        world.group.barrier()

    @property
    def service(self) -> Service | None:
        """The shard that lives with this worker."""
        return self._service

    def close(self, *, failed: bool = False) -> None:
        """Leave the servers; a shard that lives here serves until all workers have left, unless this one has failed."""
        if self._world and isinstance(self._world.group, HubGroup) and not failed:
            self._world.group.leave()
        if self._client:
            self._client.close(said=not failed)
        if self._service:
            while not failed and not self._service.wait(_LOOK_S):
                assert self._world
                self._world.status.set("serving its shard to the others")
            self._service.close()
        self._client = self._service = None
        self._tables.clear()

    # ---- inside

    def _check(self, gate: Gate, world: World | None) -> None:
        if world and isinstance(gate, Together) and gate.backups >= self._num_workers:
            raise ConfigError(
                f"{gate.words}: {self._num_workers} workers push, so at most {self._num_workers - 1} can be backups; "
                "start more of them, or give fewer backups"
            )

    def _meet(self, world: World) -> None:
        """Connect to the servers: processes of their own, or a shard with each worker."""
        group, wires = world.group, world.wires
        if wires is None:
            raise ConfigError(f"{self.gate.words} needs Paceline's own transport: leave out --transport")
        if self._per_host and world.replaces:
            raise ConfigError(
                f"{self.gate.words} with per_host=True: the workers of a host push as one, and none of them can be "
                "replaced; leave per_host out, or --replacements and MIN:MAX"
            )
        self._met = True
        workers = list(group.ranks)
        if self._per_host:
            self._front, workers = front_of(group, wires.view)
        self._num_workers = len(workers)
        self._check(self.gate, world)
        servers = list(world.servers) or workers
        if wires.rank not in workers:
            return
        own = {}
        if not world.servers:
            mine, own[wires.rank] = pair(group.rank)
            self._service = Service(limit_s=world.limit_s, agreement=agree(wires, servers))
            for rank in workers:
                self._service.attach(mine if rank == wires.rank else connect(wires, rank, wires.rank))
        connections = [own.get(rank) or connect(wires, rank, rank) for rank in servers]
        self._client = Client(group.rank, connections, limit_s=world.limit_s, status=world.status)

    def _adopt(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Open a table for the parameters that are new."""
        world = self._world
        assert world is not None
        names = names_of(model)
        found = [
            (p, names.get(id(p), f"optimizer.{i}.{j}"), i)
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
            if id(p) not in self._owned and is_trained(p)  # what is frozen is not the servers', until it thaws
        ]
        extra = {} if id(optimizer) in self._tables else {
            name: p for p, name in ((p, names[id(p)]) for p in model.parameters()) if id(p) not in self._owned
        }  # fmt: skip
        make_equal(world.group, extra | {name: p for p, name, _ in found}, {})
        held = self._tables.setdefault(id(optimizer), [])
        if not found:
            return
        name = optimizer_name(optimizer)
        options = options_of(optimizer)
        if self._correct:
            for each in options:
                self._correct.check_optimizer(each)
        rule = Rule(
            optimizer=name,
            groups=options,
            gate=self.gate.words,
            correct=self._correct.words if self._correct else "",
            codec=self.codec,
        )
        tensors = [
            (Tensor(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), group), p) for p, name, group in found
        ]
        self._owned |= {id(p) for p, _, _ in found}
        table = self._client.open(tensors, rule, cut=name in _ELEMENTWISE) if self._client else None
        parameters = [p for p, _, _ in found]
        held.append(Held(table, optimizer, parameters, len(options), self._front, self._learnt(parameters)))
        if table and world.group.rank == 0 and not world.late:
            table.store()
        world.group.barrier()
        held[-1].pull()  # also tells which version this worker's first gradients are of
        world.group.barrier()
        if world.late:
            self.rest()  # until it has a batch
            self._behind = True

    def _learnt(self, parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """What pushes of these are made of; None: their gradients."""
        return None

    def _all(self) -> list[Held]:
        return [each for held in self._tables.values() for each in held]


class Sync(Served):
    """Every step uses the gradients of all workers, as with all-reduce; sums are made in the order of ranks.

    Args:
        backups: so many of the slowest workers are not waited for; what they push too late is dropped.
        per_host: the workers of a host are summed through shared memory first, and one push leaves the host.
    """

    def __init__(self, backups: int = 0, per_host: bool = False) -> None:
        super().__init__(Together(backups), None, per_host=per_host)
        self.options = {"backups": backups, "per_host": per_host}


class Bounded(Served):
    """Workers push when they are ready, and none is more than `staleness` steps ahead of the slowest.

    Args:
        staleness: how many steps.
        correct: what is done about gradients that are old, such as "compensate" (see `paceline.staleness`).
    """

    def __init__(self, staleness: int, correct: Correction | str | Sequence[Correction | str] | None = None) -> None:
        super().__init__(Within(staleness), correct)
        self.options["staleness"] = staleness


class Async(Served):
    """Workers push when they are ready, and nobody waits for anybody.

    Args:
        correct: what is done about gradients that are old, such as "dana(0.9) + drop(16)" (see `paceline.staleness`).
    """

    def __init__(self, correct: Correction | str | Sequence[Correction | str] | None = None) -> None:
        super().__init__(Apart(), correct)
