"""What a run does with models: `run.model`, `run.backward`, `run.clip_grad_norm`. The mesh says how they are cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.mesh import Mesh
from paceline.core.settings import Settings
from paceline.parallel.cut import Cut
from paceline.parallel.outline import check_offload, whole_model
from paceline.parallel.pipeline import pipeline_of
from paceline.parallel.plan_of_split import chosen
from paceline.parallel.precise import Precise
from paceline.parallel.schedule import Staging
from paceline.parallel.unused import unused
from paceline.train.collectives import Collectives


class Models(Collectives):
    """Of one member of a run."""

    settings: Settings
    device: torch.device
    seed: int
    _cut: Cut | None  # where replicas are
    _precise: Precise
    _told: set[str]  # about options

    def _tell(self, line: str) -> None: ...

    def model(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module],
        *,
        recompute: bool = False,
        offload: str = "none",
        cut: Sequence[str] = (),
        like: Any = None,
        micro: int = 0,
        schedule: str = "1f1b",
        whole: Sequence[str] | None = None,
        split: Mapping[str, str | int] | None = None,
        sequence: bool = False,
    ) -> torch.nn.Module:
        """This member's part of a model, where `--mesh` cuts replicas; else the model, on the run's device.

        Call it before the optimizer is made. A function that makes the model (`run.model(lambda: GPT(...))`) lets it be
        larger than the memory of one member.

        Args:
            recompute: what layers compute is not kept for the backward pass, but computed again: less memory, a third
                more to compute. Layers are the elements of the model's lists (ModuleList, Sequential).
            offload: "parameters": with `--mesh shard=N`, parts and the optimizer's state lie in host memory; on one
                GPU with `--mesh shard=1`.
            split: with `--mesh split=N`, how layers are split, by patterns of their names: `{"*.up": "column",
                "*.down": "row"}`; see `paceline.parallel.plan_of_split`. None: found by itself, in transformers.
            sequence: with `--mesh split=N`, what stands between the layers that are split (norms, dropout) works on
                parts of the sequence.

        With `--mesh stage=N`, train with `run.backward`, and:

            cut: names of the modules with which all stages but the first begin; without, they are made equal.
            like: an example of the model's inputs (a tuple, if there are several), on which layers are timed to make
                stages equal; without, their bytes count.
            micro: into how many micro-batches a batch is cut; 0: four per stage, or as many as there are samples.
            schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble"; see `paceline.parallel.schedule`.
            whole: names of the model's inputs that every micro-batch gets as they are, since their rows are not samples
                (a mask that is for all of them); see `paceline.parallel.samples`.

        Options for which the mesh has no use are told once, from two members on.
        """
        parts = self._cut is not None and (self._cut.mesh.shard > 1 or self.size == 1)
        check_offload(offload, self.device, self.size, cuts=parts)
        staging = Staging(cut, like, micro, schedule, whole, self.settings.wait_limit_s, self._tell)
        staging.check()
        of_cuts = {"cut": cut, "like": like, "micro": micro, "schedule": schedule, "whole": whole}
        mesh = self._cut.mesh if self._cut else Mesh(replicate=self.size)
        for line in unused(mesh, {**of_cuts, "split": split, "sequence": sequence}):
            if line not in self._told:
                self._told.add(line)
                self._tell(line)
        if self._cut is None:
            part = whole_model(model, self.device, self.seed, recompute=recompute)
            if split:
                chosen(part, split)  # what is wrong with it is told by runs of one as well
            return part
        from paceline.parallel.model import cut_model

        part = cut_model(
            model,
            self._cut.mesh,
            self._world.group,
            self.device,
            self.seed,
            recompute=recompute,
            offload=offload == "parameters",
            staging=staging,
            split=split,
            sequence=sequence,
        )
        self._cut.take(part, self._world, offload=offload == "parameters")
        return part

    def backward(self, model: torch.nn.Module, *batch: Any, loss: Callable[[Any, Any], torch.Tensor]) -> torch.Tensor:
        """Forward, loss and backward: `run.backward(model, x, y, loss=F.cross_entropy)`; the mean loss of the batch.

        The last of `batch` is the target, the others are the model's inputs; `loss(output, target)` returns the mean
        over samples. With `--mesh stage=N` batches go through the stages in pieces, and this is the way to train; else
        it is the same as `loss(model(x), y).backward()`.
        """
        if len(batch) < 2:
            raise ConfigError("run.backward(model, *inputs, target, loss=...): an input and a target are wanted")
        *inputs, target = batch
        if self._cut and pipeline_of(model):
            return self._cut.backward(model, inputs, target, self._precise.in_full(loss), self._precise.autocast)
        value = loss(model(*inputs), target)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """For what a script computes outside of its models' forward passes: torch.autocast of the run's precision."""
        return self._precise.autocast()

    def clip_grad_norm(
        self, of: torch.nn.Module | torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients of a model or an optimizer down to this norm, if theirs is larger; returns what it was.

        As `torch.nn.utils.clip_grad_norm_`, in one exchange where members hold parts of gradients. The norm is that of
        the mean over all members, but with servers or local steps, where gradients are each member's own.
        """
        if isinstance(of, torch.optim.Optimizer):
            parameters = [p for group in of.param_groups for p in group["params"]]
        elif isinstance(of, torch.nn.Module):
            parameters = list(of.parameters())
        else:
            raise ConfigError(f"run.clip_grad_norm: a model or an optimizer is wanted, not a {type(of).__name__}")
        if self._cut and self._cut.mesh.stage > 1:
            return self._cut.clip(parameters, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
