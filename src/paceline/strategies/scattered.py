"""The gradients of one model, each summed on the member that owns it: the engine of ZeRO-2.

    gradient ready   → copied into its block, divided by the size; p.grad is freed     (our hook, during backward)
    block full       → posted: summed and scattered while backward goes on (`carrier`)
    end of backward  → what is missing is filled in, weights and marks are added up, all is awaited;
                       p.grad is this member's part of the mean                        (`own_part`)

It takes the place of `engine.Engine` in the all-reduce strategy, whose docstring has the weights; but for the parts,
`p.grad` means what it means there. A parameter that no optimizer of the run has keeps a whole gradient, and so does not
profit; one that was frozen until now travels whole once, and gets its place for the next pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import torch

from paceline.core.errors import ConfigError, Interrupted
from paceline.strategies.buckets import BAD, LATE, MARKS, PACE, SAMPLES, WEIGHT, WISH
from paceline.strategies.carrier import Carrier
from paceline.strategies.cuts import Block, Cuts, flat_like
from paceline.strategies.engine import dense, plain_rates, report_bad, uncounted
from paceline.strategies.following import Following
from paceline.strategies.holding import Holding
from paceline.strategies.own_part import OwnPart, Parts
from paceline.strategies.reducers import Coder
from paceline.strategies.strategy import World
from paceline.strategies.weighing import Weighing


class Scattered:
    """The gradients of one model; `hosted`: parts stay in host memory."""

    def __init__(
        self,
        model: torch.nn.Module,
        world: World,
        bucket_bytes: int,
        arm: Callable[[], None],
        owned: dict[int, torch.nn.Parameter],
        coder: Coder | None = None,
        *,
        cuts: Cuts,
        hosted: bool = False,
    ) -> None:
        self.order: list[str] = []
        self.busy = False
        self.broken: Interrupted | None = None
        self.coder = coder
        self._world = world
        self._arm = arm
        self._holding = held = Holding(model, world, owned, self._arrived)
        self._cuts = cuts
        self._hosted = hosted
        self._blocks: list[Block] = []  # in the order in which they are posted
        self._missing: list[int] = []  # of each, spans that have not arrived
        self._rooms: dict[int, torch.Tensor] = {}  # by id of the block: its memory while it fills
        self._places: dict[int, int] = {}  # id of the block -> where it stands
        self._marked: list[torch.nn.Parameter] = []  # in blocks; one mark each
        self._arrived_now: set[int] = set()  # ids of parameters
        self._launched = 0
        self._late: dict[str, torch.Tensor] = {}  # by name: gradients that have no place, or missed theirs
        self._bad = ""
        self._scale = 1.0 / world.group.size
        self._following = Following(model)
        self._followed = False  # it was chosen what follows
        self._parts = Parts(world, held.parameters)
        self._weighing = Weighing(world, held.parameters)
        self._carrier = Carrier(world, coder, lambda p: held.names[id(p)])

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the parameters of the model and of the optimizer that are new; all start as on the first member."""
        self._holding.adopt(optimizer)
        found = [p for group in optimizer.param_groups for p in group["params"]]
        for p in found:
            if id(p) not in self._holding.parameters:
                raise ConfigError(
                    f"zero: {self._holding.names[id(p)]} belongs to another model that was given to run.optimizer "
                    "before. Give run.optimizer the model that has all of the optimizer's parameters"
                )
        self._grow(optimizer, [p for p in found if p.requires_grad])
        self._weighing.weigh(self._world.tally.weight)

    def _grow(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Make room for parameters that are trained now."""
        told = json.dumps([self._holding.names[id(p)] for p in parameters]).encode()
        for rank, other in enumerate(self._world.group.exchange(told)):
            if odd := sorted(set(json.loads(other)) ^ set(json.loads(told))):
                raise ConfigError(
                    f"parameter {odd[0]!r} is trained on member {self._world.group.rank} or on member {rank}, but not "
                    "on both"
                )
        for block in self._cuts.grow(optimizer, parameters):
            self._places[id(block)] = len(self._blocks)
            self._blocks.append(block)
            for span in block.spans:
                if span.start == 0:
                    self._marked.append(span.parameter)
        self._start()

    def _start(self) -> None:
        self._launched = 0
        self._missing = [len(block.spans) for block in self._blocks]
        self._arrived_now.clear()

    def cleared(self, optimizer: torch.optim.Optimizer) -> None:
        self._weighing.cleared(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    @property
    def complete(self) -> bool:
        return len(self._arrived_now) == len(self._marked)

    # ---- during backward

    def _arrived(self, p: torch.Tensor) -> None:
        """The gradient of `p` is ready. Runs inside the backward pass."""
        self._weighing.arrived(p, self.busy)
        if self._world.accumulating:
            self._weighing.keep(p)
            return
        self._arm()
        if not self.busy:
            self.busy = True
            self._start()
            if self.coder:
                self.coder.begin(plain_rates(self._holding.optimizers))
        self._take(p)

    def _take(self, p: torch.Tensor) -> None:
        """Send off what is new in `p.grad`."""
        grad = p.grad
        assert grad is not None
        if isinstance(grad, OwnPart):
            own, grad = grad, grad.pending
            own.pending = None
            assert grad is not None
        else:
            p.grad = None
        grad = dense(grad.detach())
        name = self._holding.names[id(p)]
        if self._world.check_finite and not self._bad and not torch.isfinite(grad).all():
            self._bad = name
        spans = self._cuts.spans.get(id(p), [])
        if not spans or id(p) in self._arrived_now or spans[0][0].dtype != grad.dtype:
            part = grad * self._scale
            self._late[name] = self._late[name] + part if name in self._late else part
            return
        self._arrived_now.add(id(p))
        values = flat_like(grad, p)
        for block, span in spans:
            room = self._room(block)
            self._carrier.copy(values[span.start : span.stop], room[span.place], self._scale, block)
            self._missing[self._places[id(block)]] -= 1
            self._launch()

    def _room(self, block: Block) -> torch.Tensor:
        if id(block) not in self._rooms:
            self._rooms[id(block)] = self._carrier.open(block)
        return self._rooms[id(block)]

    def _launch(self) -> None:
        """Post every block that is full and whose turn it is."""
        while self._launched < len(self._blocks) and not self._missing[self._launched]:
            block = self._blocks[self._launched]
            self._launched += 1
            self._carrier.post(block, self._rooms.pop(id(block)))

    # ---- at its end

    def launch_rest(self) -> None:
        for p in self._marked:
            if id(p) in self._arrived_now or (isinstance(p.grad, OwnPart) and p.grad.pending is None):
                continue
            if p.grad is not None:  # of passes before, within run.accumulate()
                self._take(p)
        for at, block in enumerate(self._blocks):
            for span in block.spans if self._missing[at] else ():
                if id(span.parameter) not in self._arrived_now:
                    self._room(block)[span.place].zero_()
            self._missing[at] = 0
            self._launch()
        self._follow()
        group, world = self._world.group, self._world
        control = [0.0] * MARKS + [float(id(p) in self._arrived_now) for p in self._marked] + [0.0] * PACE * group.size
        at = MARKS + len(self._marked) + PACE * group.rank
        control[at : at + len(world.pace)] = world.pace
        control[at + SAMPLES] = world.tally.pending
        control[WEIGHT], control[LATE], control[BAD] = (
            self._weighing.take(),
            float(len(self._late)),
            float(bool(self._bad)),
        )
        control[WISH] = float(world.wish)
        buffers = [b.detach().reshape(-1).float().cpu() for b in self._following.tensors()]
        if group.rank:
            buffers = [torch.zeros_like(b) for b in buffers]
        self._control = torch.cat([torch.tensor(control), *buffers])
        self._carrier.all_reduce(self._control)
        if self.coder:
            self.coder.launched()

    def _follow(self) -> None:
        """After the first pass it is known which buffers change."""
        if not self._followed:
            self._followed = True
            told = self._world.group.exchange(json.dumps(self._following.changed()).encode())
            self._following.choose(name for other in told for name in json.loads(other))

    def collect(self) -> None:
        """Wait for the sums and hand out this member's parts as `p.grad`."""
        world, group = self._world, self._world.group
        try:
            self._carrier.wait()
        except Interrupted as error:
            group.abort(error)
            raise
        paces = MARKS + len(self._marked)
        end = paces + PACE * group.size
        control, buffered = self._control[:end].tolist(), self._control[end:]
        marks = dict(zip(map(id, self._marked), control[MARKS:paces]))
        if self.coder:
            without = {self._holding.names[i] for i, mark in marks.items() if not mark}
            self.coder.end(uncounted(self.coder, without, self._holding.optimizers, self._holding.names))
        self.busy = False
        world.passed += 1
        world.weighed = control[WEIGHT]
        world.granted = world.granted or control[WISH] > 0
        world.paces = control[paces:]
        if control[BAD]:
            report_bad(self._bad, group)
        correction = group.size / control[WEIGHT] if control[WEIGHT] else math.nan
        if math.isclose(correction, 1.0, rel_tol=1e-6):
            correction = 1.0
        self._hand_out(marks, correction)
        if control[LATE]:
            self._add_late(correction)
        self._parts.changed()
        if self._following and group.rank:
            tensors = self._following.tensors()
            for b, values in zip(tensors, torch.split(buffered, [b.numel() for b in tensors])):
                b.copy_(values.view(b.shape))

    def _hand_out(self, marks: dict[int, float], correction: float) -> None:
        pieces: dict[int, list[torch.Tensor]] = {i: [] for i, mark in marks.items() if mark}
        for block in self._blocks:
            total = self._carrier.sums.pop(id(block))
            if correction != 1.0:
                total.mul_(correction)
            if block.device.type != "cpu" and not self._hosted:
                total = total.to(block.device)
            start = block.part(self._world.group.rank).start
            for span in block.of(self._world.group.rank):
                if id(span.parameter) in pieces:
                    pieces[id(span.parameter)].append(total[span.at - start : span.place.stop - start])
        for i, own in pieces.items():
            self._give(self._holding.parameters[i], own)

    def _give(self, p: torch.nn.Parameter, own: list[torch.Tensor]) -> None:
        if isinstance(p.grad, OwnPart):
            for mine, more in zip(p.grad.pieces, own):
                mine.add_(more)
        else:
            p.grad = OwnPart(p, own, self._parts)

    def _add_late(self, correction: float) -> None:
        """A second round, for the gradients that travelled in no block."""
        group = self._world.group
        mine = json.dumps(sorted(self._late)).encode()
        named = {self._holding.names[i]: p for i, p in self._holding.parameters.items()}
        names = sorted({n for other in group.exchange(mine) for n in json.loads(other)})
        for optimizer in self._holding.optimizers:
            has = {id(p) for g in optimizer.param_groups for p in g["params"]}
            if new := [named[n] for n in names if id(named[n]) in has and id(named[n]) not in self._cuts.spans]:
                self._grow(optimizer, new)
        for name in names:
            p, part = named[name], self._late.pop(name, None)
            total = torch.zeros_like(p.detach()) if part is None else part
            group.all_reduce(total)
            total *= correction
            if id(p) not in self._cuts.spans:
                p.grad = total if p.grad is None else p.grad + total
                continue
            values, rank = flat_like(total, p), group.rank
            own = [own for block, span in self._cuts.spans[id(p)] if (own := span.within(block.part(rank)))]
            kept = [values[s.start : s.stop].clone() for s in own]
            self._give(p, [v.cpu() for v in kept] if self._hosted else kept)

    def regroup(self) -> None:
        raise ConfigError("zero: the members of a run cannot change")

    def release(self) -> None:
        self._weighing.release()

    def close(self) -> None:
        self._holding.close()
        self._weighing.close()
        self._carrier.close()
