"""All-reduce: every member gets the mean gradient of all members, weighted by the samples each really had.

    gradient ready   → copied into its bucket, divided by the size          (our hook, during backward)
    bucket full      → posted to the arena, reduced while backward goes on
    end of backward  → what is missing is filled in, the last bucket carries the weights and marks, all are awaited;
                       p.grad points into the bucket                       (so clipping and logging see the mean)

Let w_i be what member i drew over what it should have drawn (1 but for uneven last batches). Gradients are multiplied
by w_i before autograd adds them up; buckets hold g_i·w_i/n, and their sum is multiplied by n/Σw where Σw is not n.
A parameter without a gradient on some members counts as zero there; without one on all, its `grad` stays None.
The first backward pass only notes the order of arrival, from which the buckets are laid out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward

from paceline.codecs import Codec
from paceline.core.errors import ConfigError, Interrupted
from paceline.core.words import finite, split
from paceline.strategies.engine import Engine
from paceline.strategies.passes import Passes
from paceline.strategies.reducers import Auto, Coder, LowRank, Method, load
from paceline.strategies.reducers.coder import SMALL
from paceline.strategies.strategy import World
from paceline.strategies.unsaid import handed_on, readings_of, tell_lost

FEEDBACK = {"True": True, "False": False, "None": None}


class AllReduce:
    """Synchronous data parallelism.

    Args:
        bucket_mb: gradients travel in pieces of about this size.
        codec: what travels between hosts instead of the gradients, such as "topk(density=0.01)" (see
            `paceline.codecs`), "lowrank(rank=2)", or "auto" for what turns out to be the fastest. Members that all
            share one host exchange codes through shared memory: it saves nothing, but can be tried.
        back: the codec in which sums are sent back, such as "quantize(8)": each member then sums a part of every
            bucket, which takes fewer bytes from three hosts on. None: everyone gets everyone's codes.
        feedback: whether what a codec leaves unsaid is added to the next gradient; None: where the codec is biased.
        warmup: so many first backward passes exchange gradients as they are.

    The last three can be said in the codec's words too: "sign, back=sign, feedback=False, warmup=100".
    """

    forgives = False
    owes = False

    def __init__(
        self,
        bucket_mb: float = 4.0,
        codec: Codec | LowRank | Auto | str | None = None,
        back: Codec | str | None = None,
        feedback: bool | None = None,
        warmup: int = 0,
    ) -> None:
        if not finite(bucket_mb) or not bucket_mb > 0:
            raise ConfigError(f"allreduce(bucket_mb={bucket_mb!r}): must be more than 0, such as 4")
        self.method = Method()
        self._feedback, self._warmup = check_feedback(feedback), _check_warmup(warmup)
        self.take(codec, back)
        self.bucket_bytes = int(bucket_mb * 1e6)
        self.options = {
            "bucket_mb": float(bucket_mb),
            "codec": self.method.codec.words if self.method.codec else "none",
            "back": self.method.back.words if self.method.back else None,
            "feedback": feedback,
            "warmup": warmup,
        }
        self._engines: dict[int, Passes] = {}  # by id of the model
        self._drives: dict[int, Passes] = {}  # by id of the optimizer
        self._owned: dict[int, torch.nn.Parameter] = {}  # by id; a parameter belongs to one engine
        self._saved: list[dict[str, Any]] = []  # of engines still to come
        self._world: World | None = None
        self._make: Callable[..., Passes] = Engine
        self._alone = False  # there are engines in a run of one too
        self._task = -1  # the backward pass at whose end we are called
        self._depth = 0  # of passes within passes

    def take(self, codec: Codec | LowRank | Auto | str | None, back: Codec | str | None = None) -> None:
        """Send gradients by this codec; in words, what is said of feedback and warm-up counts too."""
        if isinstance(codec, str):
            codec, said = split(codec, ("back", "feedback", "warmup"), "codec")
            if "back" in said:
                codec += f", back={said['back']}"
            if "feedback" in said:
                self._feedback = check_feedback(FEEDBACK.get(said["feedback"], said["feedback"]))
            if "warmup" in said:
                warmup = said["warmup"]
                self._warmup = _check_warmup(int(warmup) if warmup.isdecimal() else warmup)
        self.method = Method.of(codec, back)

    def by(self, make: Callable[..., Passes], *, alone: bool = False) -> None:
        """Have gradients exchanged by another kind of engine; `alone`: also in a run of one."""
        self._make, self._alone = make, alone

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        if world.group.size == 1 and not world.elastic and not self._alone:
            if self.method.codec and not self._world:
                world.tell(f"codec {self.method.words} has no effect: this run has one member")
            self._world = world
            return
        self._world = world
        self._check_momentum(optimizer)
        engine = self._engines.get(id(model))
        if engine is None:
            engine = self._make(model, world, self.bucket_bytes, self._arm, self._owned, self._coder(model, world))
            self._engines[id(model)] = engine
            if self._saved:
                self._restore(engine, self._saved.pop(0))
        self._drives[id(optimizer)] = engine
        engine.adopt(optimizer)

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        if engine := self._drives.get(id(optimizer)):
            engine.adopt(optimizer)

    def finish(self, optimizer: torch.optim.Optimizer) -> bool:
        self.reduced()
        if self._world and self._world.dropped:
            return False
        self._check_momentum(optimizer)
        if engine := self._drives.get(id(optimizer)):
            engine.stepped(optimizer)
        if torch._C._current_graph_task_id() == -1:
            self._task = -1  # a pass that failed has been ended too
        if self._engines:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if id(p) not in self._owned:
                        raise ConfigError(
                            f"the optimizer holds a parameter of shape {tuple(p.shape)} whose gradients the members do "
                            "not exchange: it was put into param_groups by hand. Use optimizer.add_param_group"
                        )
        return True

    def reading(self) -> dict[int, list[int]]:
        if self._engines:
            raise ConfigError(
                "all-reduce sums the members' gradients pass by pass, so their threads would have to take turns: use "
                "--strategy async or bounded, or several members in place of threads"
            )
        return {}

    def wake(self) -> None:
        pass

    def rest(self) -> None:
        pass  # it is always dealt as much as the others

    def together(self, *, keep: bool = False, end: bool = False) -> None:
        pass  # they always are

    def regroup(self) -> None:
        self._task = -1
        for engine in self._engines.values():
            engine.regroup()

    def cleared(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        if any(e.busy for e in self._engines.values()):
            raise _failed_pass()
        if optimizer and (engine := self._drives.get(id(optimizer))):
            engine.cleared(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        pass  # all have stepped alike

    def showing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduced(self) -> None:
        """End the backward pass of every model that is in one."""
        engines = [e for e in self._engines.values() if e.busy]
        try:
            for engine in self._engines.values():
                if engine.broken:
                    raise engine.broken
            for engine in engines:
                engine.launch_rest()
            for engine in engines:
                engine.collect()
        except Interrupted as error:
            if not self._world or not self._world.elastic:
                raise
            self._world.mend(error)

    def _check_momentum(self, optimizer: torch.optim.Optimizer) -> None:
        if getattr(self.method.codec, "momentum", 0.0):
            for group in optimizer.param_groups:
                if (group.get("momentum") or "betas" in group) and any(p.numel() >= SMALL for p in group["params"]):
                    raise ConfigError(
                        f"{self.method.words}: dgc keeps the momentum itself. Use torch.optim.SGD with momentum=0; "
                        f"parameters of fewer than {SMALL} elements may have a group of their own with momentum"
                    )

    def _coder(self, model: torch.nn.Module, world: World) -> Coder | None:
        mine = f"{self.method.words}, feedback={self._feedback}, warmup={self._warmup}"
        told = [words.decode() for words in world.do(lambda group: group.exchange(mine.encode()))]
        for rank, words in enumerate(told):
            if words != told[0]:
                raise ConfigError(f"member 0 encodes with {told[0]} and member {rank} with {words}: give all the same")
        if self.method.codec is None:
            return None
        if self._feedback is False and getattr(self.method.codec, "rows", 1) > 1:
            raise ConfigError(f"feedback=False: {self.method.words} is nothing without what it keeps")
        for device in {p.device for p in model.parameters() if p.requires_grad}:
            load(self.method, device)
        seed = world.seed * 1009 + len(self._engines)
        return Coder(self.method, feedback=self._feedback, warmup=self._warmup, seed=seed, tell=world.tell)

    def readings(self) -> dict[str, Any]:
        return readings_of([e.coder for e in self._engines.values() if e.coder])

    def own_state(self) -> dict[str, Any]:
        coders = [e.coder for e in self._engines.values() if e.coder]
        return {"coders": [coder.state() for coder in coders]} if coders else {}

    def load_own_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Called by all members: those that have another one encode for them now give it what they left unsaid."""
        if self._world is None:
            return
        coders = [e.coder for e in self._engines.values() if e.coder]
        kept = [state["coders"] for state in states if state.get("coders")]
        if coders:
            kept = handed_on(kept, self._world.group)
        else:
            tell_lost(kept, self._world)
        for i, coder in enumerate(coders):
            coder.load([each[i] for each in kept if len(each) > i])

    def state_dict(self) -> dict[str, Any]:
        engines = self._engines.values()
        return {"engines": [{"order": e.order, "coder": e.coder.common() if e.coder else {}} for e in engines]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = list(state.get("engines", []))
        for engine, own in zip(self._engines.values(), saved):
            self._restore(engine, own)
        self._saved = saved[len(self._engines) :]

    def _restore(self, engine: Passes, state: dict[str, Any]) -> None:
        engine.order = list(state["order"])
        if engine.coder and state["coder"]:
            engine.coder.load_common(state["coder"])

    def detach(self) -> None:
        """Let the gradients go: backward passes exchange nothing from now on. Between two steps, on all members."""
        for engine in self._engines.values():
            engine.release()
        self.close()

    def close(self, *, failed: bool = False) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _arm(self) -> None:
        """Have `reduced` called when the backward pass under way ends."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            depth = _depth()
            if self._task != -1 and depth <= self._depth:  # else that pass waits around this one
                raise _failed_pass()
            self._task, self._depth = task, depth
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._task = -1
        # A pass inside another one (reentrant checkpointing) ends within a node of the outer: more may follow.
        outer = torch._C._current_autograd_node()
        if outer is None or all(e.complete for e in self._engines.values() if e.busy):
            self.reduced()
            return

        def resume(*_: object) -> None:  # the node has done its part, and the pass it belongs to goes on
            handle.remove()
            self._arm()

        handle = outer.register_hook(resume)


def check_feedback(feedback: Any) -> bool | None:
    if feedback is not None and not isinstance(feedback, bool):
        raise ConfigError(f"feedback={feedback!r}: True, False, or None for what suits the codec")
    return feedback


def _check_warmup(warmup: Any) -> int:
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        raise ConfigError(f"warmup={warmup!r}: a whole number of backward passes is needed, such as 100, or 0")
    return warmup


def _failed_pass() -> Interrupted:
    return Interrupted(
        "a backward pass failed on this member after part of its gradients had gone to the others; "
        "the run cannot go on from here: resume it from its last checkpoint"
    )


def _depth() -> int:
    """How many backward passes are under way on this thread, one within another."""
    frame, count = sys._getframe(), 0
    while frame := frame.f_back:  # type: ignore[assignment]
        count += frame.f_code is _engine_run_backward.__code__
    return count
