"""The gradients of one model: from autograd's hooks through the buckets to `p.grad`.

Used by the all-reduce strategy, whose docstring has the flow and the weights. One engine per model: a backward pass
through it begins with the first gradient that arrives (`busy`) and is ended by `launch_rest` and `collect`.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Never

import torch

from paceline.core.errors import ConfigError, Interrupted, PacelineError
from paceline.strategies.buckets import BAD, LATE, MARKS, MOVE, PACE, SAMPLES, WEIGHT, WISH, Layout, Slot
from paceline.strategies.following import Following
from paceline.strategies.holding import Holding
from paceline.strategies.loans import Loans
from paceline.strategies.reducers import Coder
from paceline.strategies.strategy import World
from paceline.strategies.weighing import Weighing
from paceline.transport.arena import Arena
from paceline.transport.group import Group


class Engine:
    """The gradients of one model; `frees`: buckets take no memory while nobody has a gradient (`loans`)."""

    def __init__(
        self,
        model: torch.nn.Module,
        world: World,
        bucket_bytes: int,
        arm: Callable[[], None],
        owned: dict[int, torch.nn.Parameter],
        coder: Coder | None = None,
        *,
        frees: bool = False,
    ) -> None:
        self.order: list[str] = []  # of arrival, on the first member
        self.busy = False  # a backward pass is under way and some gradient has arrived
        self.broken: Interrupted | None = None  # the group broke in this pass
        self._world = world
        self._bucket_bytes = bucket_bytes
        self._arm = arm
        self._holding = Holding(model, world, owned, self._arrived)
        self.coder = coder
        self._layout: Layout | None = None
        self._arenas: list[Arena] = []  # of the layout made last
        self._trained: set[int] = set()  # ids of parameters that have been trained
        self._slots: dict[int, Slot] = {}
        self._arrivals: list[str] = []
        self._late: dict[str, torch.Tensor] = {}  # by name: gradients that missed their bucket or have none
        self._bad = ""
        self._warned = False
        self._exchanged: set[int] = set()  # ids of parameters whose codec keeps momentum, since their last step
        self._scale = 1.0 / world.group.size
        self._following = Following(model)
        self._weighing = Weighing(world, self._holding.parameters, self._weigh_mean)
        self._loans = Loans() if frees else None

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the parameters of the model and of the optimizer that are new; all start as on the first member."""
        new = self._holding.adopt(optimizer)
        if any(p.requires_grad for p in new):
            self._layout = None  # laid out again at the end of the next backward pass
        self._weighing.weigh(self._world.tally.weight)

    def cleared(self, optimizer: torch.optim.Optimizer) -> None:
        """The user drops an optimizer's gradients now: accumulated passes of which nothing is left weigh nothing."""
        self.stepped(optimizer)
        self._weighing.cleared(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Its gradients are applied, or dropped."""
        if self._exchanged:
            self._exchanged -= {id(p) for group in optimizer.param_groups for p in group["params"]}

    @property
    def complete(self) -> bool:
        return bool(self._layout) and all(slot.arrived for slot in self._slots.values())

    def _arrived(self, p: torch.Tensor) -> None:
        """The gradient of `p` is ready. Runs inside the backward pass."""
        world = self._world
        if world.elastic and (world.dropped or self.broken or world.group.size == 1):
            world.passed += 1
            return
        try:
            self._weighing.arrived(p, self.busy)
            if world.accumulating:
                self._weighing.keep(p)
                if slot := self._slots.get(id(p)):
                    slot.mean = False
                return
            self._begin()
            layout = self._layout
            if layout is None:
                self._arrivals.append(self._holding.names[id(p)])
                return
            slot = self._slots.get(id(p))
            if slot is None or slot.arrived or slot.view.dtype != p.dtype:
                self._add(p, slot)
                return
            slot.bucket.arena.progress()  # what can be summed by now frees its gradients before this one is copied
            self._take(slot)
            bucket = slot.bucket
            bucket.missing -= 1
            if not bucket.missing:
                layout.launch()
        except Interrupted as error:
            if not world.elastic:
                raise
            self.broken = error  # mended when the pass has ended

    def _begin(self) -> None:
        self._arm()
        if self.busy:
            return
        self.busy = True
        if self._loans:
            self._loans.recall()
        if self._layout:
            self._layout.start()
        if self.coder:
            self.coder.begin(plain_rates(self._holding.optimizers))

    def _weigh_mean(self, p: torch.Tensor, weight: float) -> None:
        """A mean of an earlier pass, which a gradient is going to be added to, is weighed as this is, since the sum
        over the members is divided by all weights."""
        slot = self._slots.get(id(p))
        if slot is not None and slot.mean and p.grad is not None:
            p.grad.mul_(weight)

    def _take(self, slot: Slot) -> None:
        """Move a gradient into its slot. Until the pass ends `p.grad` is None, so a second one cannot add to it."""
        p, view = slot.parameter, slot.view
        grad = p.grad
        assert grad is not None
        grad = grad.detach()
        if self._world.check_finite and not self._bad and not torch.isfinite(dense(grad)).all():
            self._bad = slot.name
        if not grad.is_sparse and grad.data_ptr() == view.data_ptr():
            if id(p) in self._exchanged:
                self._warn_of_momentum()
            view.mul_(self._scale)
        elif slot.own.stop and grad.is_contiguous() and grad.dtype == view.dtype:
            self._keep(slot, grad.view(-1))
        else:
            torch.mul(dense(grad), self._scale, out=view)
        slot.arrived = True
        p.grad = None

    def _keep(self, slot: Slot, grad: torch.Tensor) -> None:
        """Copy what others sum; leave what this member sums where it is until then."""
        bucket, start, own = slot.bucket, slot.start, slot.own
        if own.start > start:
            torch.mul(grad[: own.start - start], self._scale, out=bucket.flat[start : own.start])
        if own.stop < start + grad.numel():
            torch.mul(grad[own.stop - start :], self._scale, out=bucket.flat[own.stop : start + grad.numel()])
        bucket.kept.append((own, grad[own.start - start : own.stop - start], self._scale))

    def _add(self, p: torch.Tensor, slot: Slot | None) -> None:
        """A gradient without a place: of a parameter that was frozen or had another dtype until now, or a second one in
        this pass, as of a parameter that several checkpointed segments share."""
        assert p.grad is not None
        part = dense(p.grad.detach()) * self._scale
        p.grad = None
        layout = self._layout
        waits = slot is not None and layout is not None and layout.buckets.index(slot.bucket) >= layout.launched
        if slot is not None and waits and not slot.own.stop and slot.view.dtype == p.dtype:
            slot.view.add_(part)
            return
        name = self._holding.names[id(p)]
        self._late[name] = self._late[name] + part if name in self._late else part

    def launch_rest(self) -> None:
        """The pass has ended here: fill in what did not arrive, then post what is left."""
        if self._layout is None:
            self._lay_out()
        layout = self._layout
        assert layout is not None
        for bucket in layout.buckets:
            for slot in bucket.slots:
                if slot.arrived:
                    continue
                if slot.parameter.grad is not None:
                    self._take(slot)
                else:
                    slot.view.zero_()
                bucket.missing -= 1
            layout.launch()  # bucket by bucket: in a first pass all gradients are here, and memory is freed on the way
        group = self._world.group
        control = [0.0] * MARKS + [float(s.arrived) for s in layout.slots] + [0.0] * (PACE * group.size)
        at = layout.paces + PACE * group.rank
        control[at : at + len(self._world.pace)] = self._world.pace
        control[at + SAMPLES] = self._world.tally.pending
        control[WEIGHT], control[LATE], control[BAD] = (
            self._weighing.take(),
            float(len(self._late)),
            float(bool(self._bad)),
        )
        control[WISH], control[MOVE] = float(self._world.wish), float(self._world.move)
        layout.control.copy_(torch.tensor(control))
        if self._following and group.rank == 0:
            torch._foreach_copy_(layout.buffer_views, self._following.tensors())
        elif self._following:
            layout.buffered.zero_()
        layout.launch(end=True)
        if self.coder:
            self.coder.launched()

    def collect(self) -> None:
        """Wait for the sums and hand them out as `p.grad`."""
        layout, group = self._layout, self._world.group
        assert layout is not None
        try:
            for arena in layout.arenas:
                arena.wait()
        except Interrupted as error:
            group.abort(error)
            raise
        control = layout.control.tolist()
        if self.coder:
            self.coder.end(self._uncounted(self.coder, control))
        self.busy = False
        self._world.passed += 1
        self._world.weighed = control[WEIGHT]
        self._world.granted = self._world.granted or control[WISH] > 0
        self._world.moving = self._world.moving or control[MOVE] > 0
        self._world.paces = control[layout.paces :]
        if control[BAD]:
            report_bad(self._bad, group)
        correction = group.size / control[WEIGHT] if control[WEIGHT] else math.nan
        if not math.isclose(correction, 1.0, rel_tol=1e-6):
            for bucket in layout.buckets:
                if bucket.slots:
                    last = bucket.slots[-1]
                    end = last.view.storage_offset() - bucket.flat.storage_offset() + last.parameter.numel()
                    bucket.flat[:end].mul_(correction)
        else:
            correction = 1.0
        if self._following and group.rank:
            torch._foreach_copy_(self._following.tensors(), layout.buffer_views)
        self._hand_out(layout, control)
        if control[LATE]:
            self._add_late(correction)

    def _hand_out(self, layout: Layout, control: list[float]) -> None:
        keeps_momentum = bool(self.coder and getattr(self.coder.method.codec, "momentum", 0.0))
        for bucket in layout.buckets:
            lent = self._loans.lend(bucket.flat) if self._loans else None
            for slot in bucket.slots:
                if control[MARKS + slot.index]:
                    slot.mean = True
                    if keeps_momentum:
                        self._exchanged.add(id(slot.parameter))
                    view = slot.view if lent is None else slot.within(lent)
                    slot.parameter.grad = view.detach()  # an alias: what users do to `grad.data` is theirs alone

    def _uncounted(self, coder: Coder, control: list[float]) -> set[str]:
        without = {s.name for s in self._slots.values() if not control[MARKS + s.index]}
        return uncounted(coder, without, self._holding.optimizers, self._holding.names)

    def _add_late(self, correction: float) -> None:
        """A second round, for the gradients that travelled in no bucket."""
        group = self._world.group
        mine = json.dumps(sorted(self._late)).encode()
        named = {self._holding.names[i]: p for i, p in self._holding.parameters.items()}
        for name in sorted({n for other in group.exchange(mine) for n in json.loads(other)}):
            p, part = named[name], self._late.pop(name, None)
            total = torch.zeros_like(p.detach()) if part is None else part
            group.all_reduce(total)
            total *= correction
            slot = self._slots.get(id(p))
            if slot is None or slot.view.dtype != p.dtype:  # the next pass makes room for it
                p.grad = total
                self._layout = None
            elif p.grad is None:
                p.grad = total
            else:
                slot.view.add_(total)  # where its gradient lies

    def _lay_out(self) -> None:
        """Agree on the order of gradients and lay out the buckets; the gradients so far wait in `p.grad`."""
        group = self._world.group
        # What was trained once keeps its place: a loop that freezes its models in turns needs one layout.
        self._trained |= {i for i, p in self._holding.parameters.items() if p.requires_grad}
        trained = {self._holding.names[i]: p for i, p in self._holding.parameters.items() if i in self._trained}
        told = {"order": self._arrivals, "names": sorted(trained), "changed": self._following.changed()}
        said = json.dumps(told).encode()
        everyone = [json.loads(other) for other in group.exchange(said)]
        for rank, other in enumerate(everyone):
            if other["names"] != everyone[0]["names"]:
                odd = sorted(set(other["names"]) ^ set(everyone[0]["names"]))[0]
                raise ConfigError(f"parameter {odd!r} is trained on member 0 or on member {rank}, but not on both")
        order = self.order or everyone[0]["order"]
        self.order = list(dict.fromkeys([n for n in order if n in trained] + list(trained)))
        self._following.choose(name for told in everyone for name in told["changed"])
        for arena in self._arenas:
            group.release(arena)
        self._arrivals.clear()
        named = [(n, trained[n]) for n in self.order]
        self._layout = Layout(group, named, self._following.tensors(), self._bucket_bytes, self.coder)
        self._arenas = self._layout.arenas
        self._slots = {id(s.parameter): s for s in self._layout.slots}

    def regroup(self) -> None:
        """The world has another group. What the pass under way had said is unsaid, its gradients are zeros."""
        if self.coder:
            self.coder.end(self._holding.names.values())
        for bucket in self._layout.buckets if self._layout else ():
            bucket.slots = []  # they know their bucket; shared memory is to be freed now, not when cycles are found
        self.busy, self.broken, self._layout, self._bad = False, None, None, ""
        self._arenas = []  # closed with their group
        self._slots = {}
        self._late.clear()
        self._arrivals.clear()
        self._exchanged.clear()
        self._scale = 1.0 / self._world.group.size
        self._weighing.restart()
        for p in self._holding.parameters.values():
            if p.grad is not None or p.requires_grad:  # whatever the script does to gradients before its step
                p.grad = torch.zeros_like(p)

    def _warn_of_momentum(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"paceline: member {self._world.group.rank}: several backward passes before one step each exchange "
                "gradients, and a codec that keeps the momentum counts it in each of them. Put all but the last one "
                "under run.accumulate()",
                stacklevel=6,
            )

    def release(self) -> None:
        """Give up the buckets; nothing is exchanged any more, and the members go on."""
        for arena in self._arenas:
            self._world.group.release(arena)
        self._weighing.release()
        self._arenas, self._layout, self._slots = [], None, {}

    def close(self) -> None:
        self._holding.close()
        self._weighing.close()


def uncounted(
    coder: Coder, without: set[str], optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str]
) -> set[str]:
    """Parameters whose sums will not be applied: nobody has a gradient for them (`without`), or some sum of their
    optimizer is not finite, so that a GradScaler skips its step."""
    spoilt = coder.spoilt - without
    skipped = set(spoilt)
    for optimizer in optimizers if spoilt else ():
        own = {names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]}
        if own & spoilt:
            skipped |= own
    return without | skipped


def plain_rates(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, float]:
    """The learning rates of what follows them at once, by id of the parameter."""
    groups = [g for o in optimizers if _is_sgd(o) for g in o.param_groups if not g["momentum"]]
    return {id(p): float(group["lr"]) for group in groups for p in group["params"]}


def report_bad(here: str, group: Group) -> Never:
    """By all members: name the parameters whose gradients are not finite; `here`: this member's, if it has one."""
    told = [n.decode() for n in group.exchange(here.encode())]
    where = ", ".join(f"parameter {name!r} on member {rank}" for rank, name in enumerate(told) if name)
    raise PacelineError(
        f"a gradient is not finite: {where}. Look at that member's batch and loss, lower the learning rate, "
        "or clip; without --check-finite the step would have been applied"
    )


def _is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Torch's own, also as the run has adopted it; what others have made of it may do something else."""
    kind = type(optimizer)
    return isinstance(optimizer, torch.optim.SGD) and kind.__module__ == torch.optim.SGD.__module__


def dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad
