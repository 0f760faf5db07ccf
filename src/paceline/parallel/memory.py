"""What each member of a run will hold, for each way to run it, before anything runs: `paceline plan memory`.

Of a model with weights W, gradients G, the optimizer's state S and activations A (`footprint`), on n members:

    allreduce           W + G + S + A            gradients lie in buckets all the time
    zero(stage=1)       W + S/n + max(A + G)     in host memory; on devices W + G + S/n + A
    zero(stage=2)       W + S/n + max(A + G/n)   and a few blocks on their way
    offload="optimizer" W + A                    on the device; (G + S)/n in host memory
    offload="parameters", with shard=k           A and the layers that are put together; the rest in host memory
    shard=k             (W + S)/k + max(A + G/k) and the layers that are put together
    stage=k             the fullest stage: its layers, what is used before or after them, and what a whole batch keeps
    split=k             of the factors of products 1/k, and of what layers keep within; the rest whole

`max`: over the time of a pass, since gradients come while activations go. Dimensions multiply: a stage's or a split's
layers may be sharded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.core.mesh import Mesh, parse
from paceline.parallel.footprint import Footprint, Layer, Weight, footprint
from paceline.parallel.precision import Precision, make_precision
from paceline.parallel.state_size import Optimizer, bytes_of, make_optimizer

_BLOCKS = 6 * 4_000_000  # of zero(stage=2): on their way, and being filled
_AT_A_TIME = 2  # layers that are put together: the one in use and the next


_BYTES = ("members", "parameters", "gradients", "state", "activations", "at_once", "recomputed")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a model, and the bytes that it takes of each member."""

    strategy: str
    mesh: str
    members: int
    parameters: int
    gradients: int
    state: int
    activations: int
    at_once: int  # the most that is there at the same time
    recomputed: int | None  # the same with run.model(..., recompute=True)
    host: int = 0  # what lies in host memory beside it
    offload: str = "none"  # run.model(..., offload=...)

    @property
    def words(self) -> str:
        """
        >>> Choice(strategy="allreduce", mesh="shard=2", offload="parameters", **dict.fromkeys(_BYTES, 0)).words
        'mesh shard=2, offload parameters'
        """
        said = f"mesh {self.mesh}" if self.mesh else self.strategy
        return said + (f", offload {self.offload}" if self.offload != "none" else "")

    @property
    def flags(self) -> str:
        """How it is run."""
        mesh = f" --mesh {self.mesh}" if self.mesh else ""
        strategy = "" if self.strategy == "allreduce" else f' --strategy "{self.strategy}"'
        return f"-n {self.members}{mesh}{strategy}"

    def fits(self, memory: int | None) -> str:
        """Yes, recomputed, no; nothing where nobody asked."""
        if memory is None:
            return ""
        if self.at_once <= memory:
            return "yes"
        return "recomputed" if self.recomputed is not None and self.recomputed <= memory else "no"


@dataclass(frozen=True)
class Plan:
    """All choices for so many members, and what follows from them."""

    num_parameters: int
    members: int
    memory: int | None
    choices: list[Choice]
    smallest: Choice | None = field(default=None)  # that fits, over all numbers of members

    @property
    def best(self) -> Choice | None:
        """The first that fits: choices stand in the order of what they cost in time."""
        fitting = [c for c in self.choices if c.fits(self.memory) == "yes"]
        fitting += [c for c in self.choices if c.fits(self.memory) == "recomputed"]
        return fitting[0] if fitting else None

    def choice(self, mesh: str = "", strategy: str = "allreduce", offload: str = "none") -> Choice:
        """That of a run, in the words of its settings: `plan.choice(run.settings.mesh, run.settings.strategy)`."""
        cut = {k: v for k, v in parse(mesh, self.members)._asdict().items() if k != "replicate" and v > 1}
        words = ",".join(f"{name}={size}" for name, size in cut.items())
        kind = {"zero": "zero(stage=2)"}.get(strategy, strategy)
        for choice in self.choices:
            if (choice.mesh, choice.strategy, choice.offload) == (words, kind, offload):
                return choice
        raise ConfigError(f"memory_plan: {strategy!r} on mesh {mesh!r} is not among its choices")


def memory_plan(
    make: Callable[[], nn.Module],
    inputs: Callable[[], Any] | torch.Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    members: int = 1,
    optimizer: str | Optimizer = "adamw",
    precision: str = "fp32",
    memory: int | None = None,
    device: str = "cpu",
) -> Plan:
    """What each member would hold of a model, for each strategy and mesh. Nothing is allocated.

    Args:
        make: makes the model, as for `run.model(make)`.
        inputs: a batch of one member: a tensor, a tuple or mapping of arguments of the model, or a function.
        optimizer: words such as "sgd(momentum=0.9)", or a function that makes one of parameters.
        memory: of one member, in bytes: then the plan says what fits.
        device: where it is not "cpu", what is offloaded to host memory is among the choices.

    >>> plan = memory_plan(lambda: nn.Linear(1000, 1000, bias=False), torch.zeros(8, 1000), members=2)
    >>> plan.choice().state, plan.choice(strategy="zero(stage=1)").state, plan.choice(mesh="shard=2").parameters
    (8000004, 4000002, 2000000)
    """
    how = make_precision(precision)
    give = inputs if callable(inputs) else lambda: _unfilled(inputs)
    build = make_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    plain = footprint(make, give, how)
    again = footprint(make, give, how, recompute=True) if _has_layers(plain) else None
    reckoning = Reckoning(plain, again, build, how, offloads=device != "cpu")
    choices = list(reckoning.choices(members))
    plan = Plan(sum(w.numel for w in plain.weights), members, memory, choices)
    if memory is None:
        return plan
    return Plan(plan.num_parameters, members, memory, choices, reckoning.smallest(memory))


def _unfilled(batch: Any) -> Any:
    """Tensors like these, without memory of their own."""
    return torch.utils._pytree.tree_map(
        lambda t: torch.empty(t.shape, dtype=t.dtype) if isinstance(t, torch.Tensor) else t, batch
    )


def _has_layers(found: Footprint) -> bool:
    return len(found.layers) > 2


class Reckoning:
    """The arithmetic of one model."""

    def __init__(
        self,
        plain: Footprint,
        again: Footprint | None,
        optimizer: Optimizer,
        precision: Precision,
        *,
        offloads: bool = False,
    ) -> None:
        self._offloads = offloads  # the model is on a device
        self._plain, self._again = plain, again
        self._precision = precision
        self._state = {w.name: self._state_of(w, optimizer) for w in plain.weights}
        self._num_layers = len(plain.layers) - 2

    def _state_of(self, weight: Weight, optimizer: Optimizer) -> int:
        if not weight.trained:
            return 0
        master = 4 * weight.numel if self._precision.weights and not weight.norm else 0
        return master + bytes_of(optimizer, weight.shape)

    def choices(self, members: int) -> Iterator[Choice]:
        """All for so many members, the fastest first."""
        yield self._whole("allreduce", members)
        goes_with_zero = not self._precision.weights and not self._precision.scales
        if goes_with_zero and members > 1:
            yield self._whole("zero(stage=1)", members)
            yield self._whole("zero(stage=2)", members)
        meshes = sorted(self._meshes(members), key=_cost)
        for mesh in meshes:
            yield self.cut(mesh, members)
        if self._offloads and goes_with_zero:
            yield self._whole("zero(offload=optimizer)", members)
        for mesh in meshes if self._offloads else ():
            if mesh.get("shard", 1) == math.prod(mesh.values()):
                yield self.cut(mesh, members, offload=True)
        if self._offloads and members == 1:
            yield self.cut({}, members, offload=True)

    def smallest(self, memory: int) -> Choice | None:
        """The choice with the fewest members that fits, without recomputing where that is possible.

        Whole and sharded replicas come first: they go with any model, where stages and splits may not.
        """
        sizes = sorted({2**i for i in range(13)} | {3 * 2**i for i in range(11)})
        for any_model, members in itertools.product((True, False), sizes):
            fitting = [(c.fits(memory) != "yes", i, c) for i, c in enumerate(self.choices(members))]
            fitting = [f for f in fitting if f[2].fits(memory) != "no"]
            if any_model:
                fitting = [f for f in fitting if "stage" not in f[2].mesh and "split" not in f[2].mesh]
            if fitting:
                return min(fitting, key=lambda f: f[:2])[2]
        return None

    def _meshes(self, members: int) -> Iterator[dict[str, int]]:
        known: tuple[str, ...] = Mesh._fields
        dimensions = [name for name in ("stage", "shard", "split") if name in known]
        divisors = [d for d in range(1, members + 1) if members % d == 0]
        for sizes in itertools.product(divisors, repeat=len(dimensions)):
            mesh: dict[str, int] = dict(zip(dimensions, sizes))
            product = math.prod(sizes)
            half = self._precision.weights or self._precision.scales or self._precision.kind == "fp8"
            if product == 1 or members % product or mesh.get("stage", 1) > max(self._num_layers, 1):
                continue
            if half and (mesh.get("shard", 1) > 1 or mesh.get("split", 1) > 1):
                continue
            if mesh.get("stage", 1) > 1 and (mesh.get("split", 1) > 1 or self._precision.scales):  # a run refuses them
                continue
            yield mesh

    # ---- whole replicas

    def _whole(self, strategy: str, members: int) -> Choice:
        weights = sum(w.nbytes for w in self._plain.weights) + self._plain.buffers
        gradients = sum(w.nbytes for w in self._plain.weights if w.trained)
        state = sum(self._state.values())
        stage = {"zero(stage=1)": 1, "zero(stage=2)": 2}.get(strategy, 0)
        hosted = strategy == "zero(offload=optimizer)"
        part = state if not stage and not hosted else math.ceil(state / members)
        mine = gradients if stage < 2 and not hosted else math.ceil(gradients / members)
        host = part + mine if hosted else 0
        if hosted:
            part = mine = 0

        def at_once(found: Footprint) -> int:
            if hosted:
                passes = found.most(0.0) + max(w.nbytes for w in self._plain.weights)
            elif stage == 2:
                passes = found.most(1 / members) + min(_BLOCKS, gradients)
            elif stage == 1 and not self._offloads:  # a gradient is there twice while its bucket fills
                passes = found.most(1.0) + max(w.nbytes for w in self._plain.weights)
            elif members > 1:
                passes = gradients + found.most(0.0)
            else:
                passes = found.most(1.0)
            stepping = mine + self._in_full(gradients)
            return math.ceil(weights + part + max(passes, stepping))

        return Choice(
            strategy=strategy,
            mesh="",
            members=members,
            parameters=weights,
            gradients=mine,
            state=part,
            activations=math.ceil(self._plain.most(0.0)),
            at_once=at_once(self._plain),
            recomputed=at_once(self._again) if self._again else None,
            host=host,
        )

    def _in_full(self, gradients: int) -> int:
        """Gradients in float32, while bf16 weights are stepped through their masters."""
        return 2 * gradients if self._precision.weights else 0

    # ---- replicas that are cut

    def cut(self, mesh: Mapping[str, int], members: int, *, offload: bool = False) -> Choice:
        """On a mesh whose other members are replicas."""
        stages, shards, splits = (mesh.get(name, 1) for name in ("stage", "shard", "split"))
        replicas = members // (stages * shards * splits)
        runs = _stages(self._plain.layers, stages, splits)
        if stages > 1:
            runs[-1] = [*runs[-1], Layer(self._plain.tied)]
        loads = [self._load(run, shards, splits, parts=shards > 1 or offload) for run in runs]
        fullest = max(
            range(stages), key=lambda i: self._at_once(self._plain, i, loads[i], mesh, replicas, offload=offload)
        )
        parameters, gradients, state, whole = load = loads[fullest]
        buckets = gradients if replicas > 1 else 0  # all the time, beside those that the cut has made
        again = None
        if self._again:
            again = self._at_once(self._again, fullest, load, mesh, replicas, offload=offload)
        return Choice(
            strategy="allreduce",
            mesh=",".join(f"{name}={size}" for name, size in mesh.items() if size > 1),
            members=members,
            parameters=0 if offload else parameters,
            gradients=0 if offload else gradients + buckets,
            state=0 if offload else state,
            activations=math.ceil(self._share(self._plain, fullest, stages, splits) * self._plain.most(0.0)) + whole,
            at_once=self._at_once(self._plain, fullest, load, mesh, replicas, offload=offload),
            recomputed=again,
            host=parameters + gradients + buckets + state if offload else 0,
            offload="parameters" if offload else "none",
        )

    def _at_once(
        self,
        found: Footprint,
        stage: int,
        load: tuple[int, int, int, int],
        mesh: Mapping[str, int],
        replicas: int,
        *,
        offload: bool,
    ) -> int:
        """The most that a member of a stage holds."""
        parameters, gradients, state, whole = load
        if offload:
            parameters = gradients = state = 0
        buckets = gradients if replicas > 1 else 0
        share = self._share(found, stage, mesh.get("stage", 1), mesh.get("split", 1))
        total = sum(w.nbytes for w in found.weights if w.trained) or 1
        # Gradients of this stage, against those of all that the moments count.
        passes = (share * found.most(gradients / total / share) if share else gradients) + whole
        stepping = gradients + self._in_full(gradients)
        return math.ceil(parameters + state + buckets + max(passes, stepping))

    def _load(self, run: Sequence[Layer], shards: int, splits: int, *, parts: bool) -> tuple[int, int, int, int]:
        """Parameters, gradients and state of a stage's member, and what is put together at a time where it has parts
        of tensors."""

        def sums(of: Sequence[Layer], size: Callable[[Weight], float]) -> float:
            return sum(size(w) / (splits if w.divides else 1) for layer in of for w in layer.weights)

        buffers = self._plain.buffers
        parameters = math.ceil(sums(run, lambda w: w.nbytes) / shards) + buffers
        gradients = math.ceil(sums(run, lambda w: w.nbytes * w.trained) / shards)
        state = math.ceil(sums(run, lambda w: self._state[w.name]) / shards)
        if not parts:
            return parameters, gradients, state, 0
        ends = (self._plain.layers[0], self._plain.layers[-1])
        outside = [layer for layer in run if any(layer is end for end in ends)]
        inside = [layer for layer in run if not any(layer is end for end in ends)]
        largest = max((sums([layer], lambda w: w.nbytes) for layer in inside), default=0)
        return parameters, gradients, state, math.ceil(sums(outside, lambda w: w.nbytes) + _AT_A_TIME * largest)

    def _share(self, found: Footprint, stage: int, stages: int, splits: int) -> float:
        """Which part of a batch's activations a member of a stage has."""
        runs = _stages(self._plain.layers, stages, splits)
        place = {id(layer): i for i, run in enumerate(runs) for layer in run}
        mine = sum(
            layer.passes + (layer.kept - layer.passes) / splits
            for layer, own in zip(found.layers, self._plain.layers)
            if place[id(own)] == stage
        )
        return mine / (sum(layer.kept for layer in found.layers) or 1)


def _stages(found: Sequence[Layer], stages: int, splits: int) -> list[list[Layer]]:
    """Layers one after another, in runs of about equal weight; what stands outside goes with the first and the last."""
    if stages == 1:
        return [list(found)]
    outside, inside, end = found[0], list(found[1:-1]), found[-1]

    def weigh(layer: Layer) -> float:
        return sum(w.nbytes / (splits if w.divides else 1) for w in layer.weights)

    runs: list[list[Layer]] = [[outside]]
    left, still = sum(map(weigh, found)), stages
    load = weigh(outside)
    for i, layer in enumerate(inside):
        remaining = len(inside) - i
        full = load + weigh(layer) / 2 > left / still
        if still > 1 and (full or remaining < still) and (len(runs[-1]) > (1 if len(runs) == 1 else 0)):
            left, still, load = left - load, still - 1, 0.0
            runs.append([])
        runs[-1].append(layer)
        load += weigh(layer)
    runs += [[] for _ in range(stages - len(runs))]
    runs[-1].append(end)
    return runs


def _cost(mesh: Mapping[str, int]) -> tuple[int, int, list[int]]:
    """Fewer kinds of cuts first, then fewer parts; shards before splits before stages."""
    sizes = [mesh.get(name, 1) for name in ("stage", "split", "shard")]
    return sum(size > 1 for size in sizes), math.prod(sizes), sizes
