"""The strategy of a run whose replicas are cut: the cut makes one gradient of what a replica's members have, and the
strategy beneath makes replicas agree, part by part.

    backward          as PyTorch's parts do it; gradients end as parts, averaged over the members of a shard
    end of backward   all members tell each other the weights of their batches, and what else they have to agree on;
                      then the parts' gradients pass through the strategy as those of a model of their own, with the
                      members that hold the same parts
    optimizer.step()  the user's own, on parts

A batch that is not full weighs less: the gradient that enters the model from the loss is multiplied by its weight, and
the mean is divided by the mean weight.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from paceline.core.errors import ConfigError
from paceline.core.mesh import Mesh
from paceline.parallel.along import along
from paceline.parallel.gathered import Gathered, clip_over_stages
from paceline.parallel.pieces import Pieces, local
from paceline.parallel.pipeline import Loss, Under, pipeline_of
from paceline.parallel.wholes import EveryTensor, Wholes, load_model, parts_of
from paceline.strategies import AllReduce, Local, Strategy, Tally, World
from paceline.strategies.buckets import PACE, SAMPLES
from paceline.strategies.engine import report_bad
from paceline.strategies.hosted import fuse
from paceline.strategies.round_state import learnt_apart, tell_left_out
from paceline.strategies.strategy import Inside

_WEIGHT, _WISH, _BAD = range(3)
_WORDS = 3


class Cut:
    """Makes replicas agree that are cut; see `paceline.strategies.Strategy`."""

    forgives = False
    owes = False

    def __init__(self, strategy: Strategy, mesh: Mesh) -> None:
        if not isinstance(strategy, AllReduce | Local):
            raise ConfigError(
                f"--mesh {mesh.words} goes with allreduce and with local steps: servers hold whole tensors, and zero "
                "shares out what shards have already"
            )
        self.strategy, self.mesh = strategy, mesh
        self._models: dict[int, _Part] = {}  # by id of the model
        self._drives: dict[int, _Part] = {}  # by id of the optimizer
        self._world: World | None = None
        self._task = -1
        self._kept: dict[int, dict[str, Any]] = {}  # by id of model or optimizer: all of its state, for a checkpoint

    @property
    def options(self) -> dict[str, Any]:
        return self.strategy.options

    def take(self, model: nn.Module, world: World, *, offload: bool = False) -> None:
        """A model was cut. `offload`: its parts lie in host memory."""
        self._world = world
        pipeline = pipeline_of(model)
        wholes = Gathered(model, pipeline, world.group, self.mesh) if pipeline else EveryTensor(model, world.group)
        self._models[id(model)] = _Part(model, self, wholes, offload)

    def backward(self, model: nn.Module, inputs: Sequence[Any], target: Any, loss: Loss, under: Under) -> torch.Tensor:
        """Forward, loss and backward of a model in stages; the mean loss of the batch.

        Args:
            under: what forward passes run under.
        """
        part, pipeline = self._models[id(model)], pipeline_of(model)
        assert pipeline
        assert self._world
        if part.inside is None:
            raise ConfigError("run.backward: give the model and its optimizer to run.optimizer before")
        weight = self._world.tally.take()[0]
        part.busy = True
        part.weights.append(weight)
        sent_bytes, waited_s = pipeline.spent
        mean = pipeline.backward(inputs, target, loss, weight, self._world.group, under)
        if pipeline.layout.tied and not self._world.accumulating:
            if part.exchanged:
                raise ConfigError(
                    "several backward passes before one step, of a model that has weights in several stages: put all "
                    "but the last one under run.accumulate()"
                )
            pipeline.tie(dict(model.named_parameters()))
        self._world.sent_bytes += pipeline.spent[0] - sent_bytes
        self._world.waited_s += pipeline.spent[1] - waited_s
        self.reduced()
        return mean

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip to the norm over all members of a replica."""
        return clip_over_stages([part.model for part in self._models.values()], parameters, max_norm, norm_type)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        part = self._models.get(id(model))
        if part is None:
            raise ConfigError(
                f"--mesh {self.mesh.words} cuts models: write model = run.model(model) before the optimizer is made, "
                "and give both to run.optimizer"
            )
        if part.split:
            part.split.check(optimizer)
        known = {id(p) for p in model.parameters()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in known:
                    raise ConfigError(
                        f"the optimizer holds a parameter of shape {tuple(p.shape)} that the model has not, since it "
                        "was cut: make the optimizer after model = run.model(model), from its parameters"
                    )
        if part.inside is None:
            part.inside = Inside(world, along(self.mesh, world.group, "replicate"), tally=Tally(), check_finite=False)
            part.pieces = Pieces(model)
        assert part.pieces
        part.shadows[id(optimizer)] = shadow = _Shadow(optimizer, part.pieces)
        part.wholes.check(optimizer)
        self._drives[id(optimizer)] = part
        self.strategy.attach(part.pieces, shadow, part.inside)

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        raise ConfigError(
            "add_param_group: parameters of a model that is cut cannot be added in a run; give all at once"
        )

    # ---- a pass

    def arm(self) -> None:
        """A backward pass through a model that is cut is under way: have `reduced` called at its end."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._task = -1
        self.reduced()

    def reduced(self) -> None:
        """End the pass of every model that is in one."""
        for part in self._models.values():
            if part.busy and part.inside and not part.inside.accumulating:
                self._reduce(part)

    def _reduce(self, part: _Part) -> None:
        world, inside, pieces = self._world, part.inside, part.pieces
        assert world
        assert inside
        assert pieces
        part.busy = False
        if part.split:
            part.split.agree()
        weight, part.weights = sum(part.weights) / len(part.weights), []
        found = pieces.pull()
        bad = next((n for n, (p, _) in pieces.of.items() if world.check_finite and not _finite(p.grad)), "")
        shares = self._tell(world, weight, bad)
        mean = sum(shares) / len(shares)  # of those whose gradients the cut has averaged
        if mean not in (0.0, 1.0):
            if part.exchanged:
                raise ConfigError(
                    "several backward passes before one step, of batches that are not full: put all but the last one "
                    "under run.accumulate(), or leave short batches out with drop_last=True"
                )
            for _, gradient in found:
                gradient.div_(mean)
        part.exchanged = True
        inside.tally.weigh(mean)
        if inside.group.size > 1 and found:
            with torch.enable_grad():
                torch.autograd.backward([p for p, _ in found], [g for _, g in found])
            self.strategy.reduced()
            pieces.push()
        else:
            world.passed += 1

    def _tell(self, world: World, weight: float, bad: str) -> list[float]:
        """Tell all of this member's batch and wishes; the weights of the batches in the mean that the cut has made."""
        group = world.group
        mine = [weight, float(world.wish), float(bool(bad)), *([0.0] * PACE)]
        mine[_WORDS : _WORDS + len(world.pace)] = world.pace
        mine[_WORDS + SAMPLES] = world.tally.pending
        rows = [row.tolist() for row in group.all_gather(torch.tensor(mine, dtype=torch.float64))]
        world.granted = world.granted or any(row[_WISH] for row in rows)
        world.paces = [x for row in rows for x in row[_WORDS:]]
        firsts = self.mesh.along(0, "replicate", "shard")  # one for each share of the data
        world.weighed = sum(rows[rank][_WEIGHT] for rank in firsts)
        if any(row[_BAD] for row in rows):
            report_bad(bad, group)
        return [rows[rank][_WEIGHT] for rank in self.mesh.along(group.rank, "shard")]

    # ---- steps

    def finish(self, optimizer: torch.optim.Optimizer) -> bool:
        self._kept.clear()
        self.reduced()
        part = self._drives[id(optimizer)]
        steps = self.strategy.finish(part.shadows[id(optimizer)].follow())
        part.fused = fuse(optimizer) if part.offload and steps else []
        return steps

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        for group, before in self._drives[id(optimizer)].fused:
            group.update(before)
        self.strategy.stepped(self._drives[id(optimizer)].shadows[id(optimizer)])

    def cleared(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        for part in self._models.values():
            if optimizer and id(optimizer) in part.shadows:
                part.busy, part.weights, part.exchanged = False, [], False
                self.strategy.cleared(part.shadows[id(optimizer)])
        if optimizer is None:
            self.strategy.cleared()

    def reading(self) -> Mapping[int, Sequence[int]]:
        raise ConfigError(f"--mesh {self.mesh.words}: members of a replica compute together, and cannot have threads")

    def wake(self) -> None:
        self.strategy.wake()

    def rest(self) -> None:
        self.strategy.rest()

    def regroup(self) -> None:
        raise ConfigError(f"--mesh {self.mesh.words}: members of a replica cannot come and go")

    # ---- between steps

    def together(self, *, keep: bool = False, end: bool = False) -> None:
        self.strategy.together(keep=keep, end=end)
        assert self._world
        for part in self._models.values():
            for buffer in part.model.buffers():
                part.wholes.alike.broadcast(local(buffer), getattr(buffer, "home", 0))  # a branch has another member's
        if keep:
            with self.strategy.showing():
                for part in self._models.values():
                    self._kept |= part.wholes.keep([shadow.of for shadow in part.shadows.values()])

    def state_of(self, part: Any) -> dict[str, Any]:
        """All of a model's or an optimizer's state, as `together(keep=True)` has put it together on the first."""
        return self._kept[id(part)]

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Take this member's parts out of the whole."""
        load_model(model, self._models[id(model)].wholes.mine(state))

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], names: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        """The state of an optimizer with this member's parts in the place of whole tensors.

        Args:
            names: of the parameters of each group, in the checkpoint.
        """
        return parts_of(optimizer, self._drives[id(optimizer)].wholes.own_optimizer(optimizer, state, names))

    def showing(self) -> contextlib.AbstractContextManager[None]:
        return self.strategy.showing()

    # ---- the rest is the strategy's

    def readings(self) -> dict[str, Any]:
        return self.strategy.readings()

    def state_dict(self) -> dict[str, Any]:
        return {}  # nothing that the strategy holds is the same on all: parts differ

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def own_state(self) -> dict[str, Any]:
        mine = {"common": self.strategy.state_dict(), "own": self.strategy.own_state()}
        return {"mesh": list(self.mesh), **mine}

    def load_own_state(self, states: Sequence[dict[str, Any]]) -> None:
        """On another mesh the strategy begins anew, from the weights and the optimizer that the checkpoint has."""
        if len(states) == 1 and states[0].get("mesh") == list(self.mesh):
            self.strategy.load_state_dict(states[0]["common"])
            self.strategy.load_own_state([states[0]["own"]])
        elif any(learnt_apart(state) for state in states):
            assert self._world
            tell_left_out(self._world)

    def close(self, *, failed: bool = False) -> None:
        self.strategy.close(failed=failed)


class CutModel:
    """A model as a checkpoint holds it: whole."""

    def __init__(self, model: nn.Module, cut: Cut) -> None:
        self._model, self._cut = model, cut

    def state_dict(self) -> dict[str, Any]:
        return self._cut.state_of(self._model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cut.load_model(self._model, state)


class _Part:
    """A model that is cut, on this member."""

    def __init__(self, model: nn.Module, cut: Cut, wholes: Wholes, offload: bool) -> None:
        self.model = model
        self.wholes = wholes
        self.offload = offload
        self.fused: list[tuple[dict[str, Any], dict[str, Any]]] = []  # groups of a step, and their options before
        self.split = vars(model).get("_paceline_split")  # what makes its members agree
        self.busy = False  # a pass has begun whose gradients the strategy has not seen
        self.exchanged = False  # since gradients were cleared
        self.weights: list[float] = []  # of the passes whose gradients are being added up
        self.inside: Inside | None = None
        self.pieces: Pieces | None = None
        self.shadows: dict[int, _Shadow] = {}  # by id of the optimizer
        self._pass = -1
        self._cut = weakref.ref(cut)
        model.register_forward_hook(self._forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Part:
        raise ConfigError(
            "a model that is cut cannot be copied, since a copy would not know its parts: for an average of weights, "
            "keep copies of its parameters"
        )

    def _forward(self, model: nn.Module, given: Any, out: Any) -> None:
        if torch.is_grad_enabled() and self.inside:
            for tensor in _tensors(out):
                if tensor.requires_grad:
                    tensor.register_hook(self._enters)  # type: ignore[no-untyped-call]

    def _enters(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """A gradient comes into the model from the loss."""
        cut = self._cut()
        assert cut
        assert cut._world
        task = torch._C._current_graph_task_id()
        if not self.busy or task != self._pass:
            self._pass, self.busy = task, True
            self.weights.append(cut._world.tally.take()[0])
        cut.arm()
        weight = self.weights[-1]
        return None if weight == 1.0 else gradient * weight if weight else torch.zeros_like(gradient)


class _Shadow(torch.optim.Optimizer):
    """The user's optimizer as the strategy knows it: with parts instead of parameters, and its options of now."""

    def __init__(self, optimizer: torch.optim.Optimizer, pieces: Pieces) -> None:
        self.of = optimizer
        part_of = {id(p): part for p, part in pieces.of.values()}
        super().__init__([{**g, "params": [part_of[id(p)] for p in g["params"]]} for g in optimizer.param_groups], {})

    def follow(self) -> _Shadow:
        for mine, theirs in zip(self.param_groups, self.of.param_groups):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        return self

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("the user's own steps")


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))


def _finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or bool(torch.isfinite(local(gradient)).all())
