"""ZeRO: data parallelism whose optimizer is cut among the members, and with stage 2 its gradients too.

    stage 1   end of backward: every member has the mean gradient, as with all-reduce; its memory is free once the
              script has dropped it (`loans`)
              step(): each member steps the elements that it owns, and all gather the weights
    stage 2   during backward: each gradient is summed on the member that owns it, and freed everywhere (`scattered`)
              step(): as above

Per member, of weights W, gradients G and the optimizer's state S, on n members:

    all-reduce  W + G + S        stage 1  W + G + S/n        stage 2  W + (G + S)/n

With `offload="optimizer"` the state, and with stage 2 the gradients, lie in host memory (`hosted`). Which member owns
what is in `cuts`. Sums are the same as with all-reduce, so are weights and checkpoints: a run may go on with another
number of members, or by another strategy.

Reference: Rajbhandari and others, ZeRO: Memory optimizations toward training trillion parameter models, 2020.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from paceline.codecs import Codec
from paceline.core.errors import ConfigError
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.cuts import Cuts
from paceline.strategies.engine import Engine
from paceline.strategies.hosted import Hosted
from paceline.strategies.reducers import Auto, LowRank
from paceline.strategies.scattered import Scattered
from paceline.strategies.share import Share
from paceline.strategies.strategy import World

OFFLOADS = ("none", "optimizer")


class Zero:
    """Synchronous data parallelism with less memory per member.

    Args:
        stage: 1: each member keeps a part of the optimizer's state. 2: and of the gradients.
        bucket_mb: gradients and weights travel in pieces of about this size.
        codec: what travels in place of gradients, as with `AllReduce`; weights travel as they are.
        offload: "optimizer": the optimizer's state and its step are in host memory; also in a run of one.
    """

    forgives = False
    owes = False

    def __init__(
        self,
        stage: int = 2,
        bucket_mb: float = 4.0,
        codec: Codec | LowRank | Auto | str | None = None,
        offload: str = "none",
    ) -> None:
        if stage not in (1, 2) or isinstance(stage, bool):
            raise ConfigError(f"zero(stage={stage!r}): 1 cuts the optimizer's state, 2 the gradients too")
        if offload not in OFFLOADS:
            raise ConfigError(
                f"zero(offload={offload!r}): allowed are {' and '.join(OFFLOADS)}; parameters are offloaded by "
                "--mesh shard=N and run.model(model, offload='parameters')"
            )
        self.stage = stage
        self.offload = offload
        self._sums = AllReduce(bucket_mb, codec)
        self._check_codec()
        self.options = {
            "stage": stage,
            "bucket_mb": float(bucket_mb),
            "codec": self._sums.options["codec"],
            "offload": offload,
        }
        self._cuts: Cuts | None = None
        self._world: World | None = None
        self._shares: dict[int, Share] = {}  # by id of the optimizer
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._seen: dict[int, int] = {}  # by id of the optimizer: blocks that it has looked through
        self._told = False

    def take(self, codec: Codec | LowRank | Auto | str | None) -> None:
        self._sums.take(codec)
        self._check_codec()

    def _check_codec(self) -> None:
        codec = self._sums.method.codec
        keeps = isinstance(codec, Auto) or bool(getattr(codec, "momentum", 0))
        if self.stage == 2 and codec is not None and keeps:
            raise ConfigError(
                f"zero(stage=2, codec={codec.words!r}): what chooses a codec, or keeps a momentum, looks at whole "
                "gradients. Use stage=1, or another codec, such as quantize(8)"
            )

    # ---- the contract

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        if world.elastic:
            raise ConfigError(
                "zero: each member alone holds a part of the optimizer's state, which would be lost with it, so "
                "members cannot come and go: start a fixed number with -n N, or use --strategy allreduce"
            )
        self._world = world
        hosts = self.offload == "optimizer" and _on_devices(optimizer)
        if self._cuts is None:
            self._begin(world, hosts)
        self._refuse_shared(optimizer)
        self._sums.attach(model, optimizer, world)
        if world.group.size == 1 and not hosts:
            return
        self._optimizers[id(optimizer)] = optimizer
        self._shares[id(optimizer)] = Share(optimizer, world, Hosted() if hosts else None, scattered=self.stage == 2)
        self._grow(optimizer)

    def _begin(self, world: World, hosts: bool) -> None:
        coded = self._sums.method.codec is not None
        self._cuts = Cuts(world.group.size, self._sums.bucket_bytes, ranges=not coded)
        if self.stage == 2:
            self._sums.by(functools.partial(Scattered, cuts=self._cuts, hosted=hosts), alone=hosts)
        else:
            self._sums.by(functools.partial(Engine, frees=True))
        if self.offload == "optimizer" and not hosts:
            world.tell('zero(offload="optimizer") has no effect: the model is in host memory already')
        elif world.group.size == 1 and not hosts:
            world.tell("zero has no effect: this run has one member")

    def _refuse_shared(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._cuts is not None
        for group in optimizer.param_groups:
            for p in group["params"]:
                if any(block.optimizer != id(optimizer) for block, _ in self._cuts.spans.get(id(p), ())):
                    raise ConfigError(
                        f"zero: a parameter of shape {tuple(p.shape)} is in two optimizers, and its state can lie with "
                        "one: leave it out of the other, or use --strategy allreduce"
                    )

    def _grow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over parameters that are trained now and were not before."""
        assert self._cuts is not None
        if self.stage == 1:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._cuts.grow(optimizer, [p for p in parameters if p.grad is not None or p.requires_grad])
        seen = self._seen.get(id(optimizer), 0)
        if seen < len(self._cuts.blocks) or not seen:
            self._seen[id(optimizer)] = len(self._cuts.blocks)
            mine = [block for block in self._cuts.blocks[seen:] if block.optimizer == id(optimizer)]
            self._shares[id(optimizer)].grow(mine)

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        if self._cuts is not None:
            self._refuse_shared(optimizer)
        self._sums.extend(optimizer)
        if id(optimizer) in self._shares:
            self._grow(optimizer)

    def reduced(self) -> None:
        self._sums.reduced()

    def finish(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step this member's share, and gather the weights."""
        if not self._sums.finish(optimizer):
            return False
        share = self._shares.get(id(optimizer))
        if share is None:
            return True
        self._grow(optimizer)
        share.step()
        return False

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def reading(self) -> dict[int, list[int]]:
        if self._shares:
            raise ConfigError(
                "zero sums the members' gradients pass by pass, so their threads would have to take turns: use "
                "--strategy async or bounded, or several members in place of threads"
            )
        return {}

    def rest(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def together(self, *, keep: bool = False, end: bool = False) -> None:
        """Weights are equal; for a checkpoint the first member gets everyone's state, until `showing` ends."""
        for share in self._shares.values() if keep else ():
            share.fetch()

    def showing(self) -> AbstractContextManager[None]:
        return self._showing()

    @contextmanager
    def _showing(self) -> Iterator[None]:
        try:
            yield
        finally:
            for share in self._shares.values():
                share.forget()

    def cleared(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._sums.cleared(optimizer)

    def regroup(self) -> None:
        raise ConfigError("zero: the members of a run cannot change")

    def readings(self) -> dict[str, Any]:
        return self._sums.readings()

    @property
    def state_bytes(self) -> int:
        """Of the optimizers' state that this member holds."""
        return sum(share.nbytes for share in self._shares.values())

    def state_dict(self) -> dict[str, Any]:
        copies = [share.copies for share in self._shares.values()]
        return {**self._sums.state_dict(), **({"copies": copies} if any(copies) else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.load_state_dict(state)
        for share, copies in zip(self._shares.values(), state.get("copies", ())):
            share.copies = dict(copies)

    def own_state(self) -> dict[str, Any]:
        return self._sums.own_state()

    def load_own_state(self, states: Sequence[dict[str, Any]]) -> None:
        """A run was resumed: each member takes its pieces of what was loaded."""
        self._sums.load_own_state(states)
        for share in self._shares.values():
            share.take(anew=True)

    def close(self, *, failed: bool = False) -> None:
        self._sums.close(failed=failed)
        self._shares.clear()


def _on_devices(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its parameters lie elsewhere than in host memory."""
    return any(p.device.type != "cpu" for group in optimizer.param_groups for p in group["params"])
