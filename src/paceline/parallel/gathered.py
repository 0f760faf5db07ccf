"""What is of a whole model in stages: its state as a checkpoint holds it, on the first member, and the way back; and
the norm of its gradients.

Names are those of the whole model everywhere. An optimizer numbers its parameters; those of the whole have the numbers
that they would have in a run without stages: group by group, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.checkpoint import pack, unpack
from paceline.core.errors import ConfigError
from paceline.core.mesh import Mesh
from paceline.parallel.along import along
from paceline.parallel.pieces import whole
from paceline.parallel.pipeline import Pipeline, pipeline_of
from paceline.strategies.replicas import names_of
from paceline.transport.group import Group

_PART_BYTES = 1 << 26


class Gathered:
    """That of one model and its optimizers; see `wholes.Wholes`."""

    def __init__(self, model: nn.Module, pipeline: Pipeline, group: Group, mesh: Mesh) -> None:
        self._model, self._layout, self._stages = model, pipeline.layout, pipeline.group
        self._first = group.rank == 0
        self._tells = group.rank in mesh.along(0, "stage")  # its state goes to the first member
        self.alike = along(mesh, group, "replicate", "shard")  # who has the same stages

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Groups must be those of a run without stages, as far as this member has them."""
        places = {name: i for i, name in enumerate(self._layout.parameters)}
        names = names_of(self._model)
        for group in optimizer.param_groups:
            order = [places[names[id(p)]] for p in group["params"]]
            if order != sorted(order):
                raise ConfigError(
                    "a model in stages: give the optimizer the parameters of a group in the order of "
                    "model.parameters(), so that checkpoints fit all meshes"
                )
        counts = [int(n) for n in self._stages.all_gather(torch.tensor([len(optimizer.param_groups)]))]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"the members of a pipeline have optimizers with {counts} groups: make the same groups on all, also "
                'those that are empty where a stage has none of their parameters: {"params": []}'
            )

    # ---- to the first member

    def keep(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, dict[str, Any]]:
        """Everyone calls this; the first member gets the whole of each, by id."""
        kept: dict[int, dict[str, Any]] = {}
        tensors = {name: self._host(t) for name, t in self._model.state_dict(keep_vars=True).items()}
        kept[id(self._model)] = {}
        for name in self._layout.saved:
            kept[id(self._model)][name] = self._bring(self._layout.owner(name), tensors.pop(name, None))
        for optimizer in optimizers:
            kept[id(optimizer)] = self._optimizer(optimizer)
        return kept

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        names = names_of(self._model)
        own = optimizer.state_dict()
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        numbers = dict(
            zip([n for group in groups for n in group], [i for g in own["param_groups"] for i in g["params"]])
        )
        state = {
            name: {k: self._host(v) if isinstance(v, torch.Tensor) else v for k, v in own["state"][i].items()}
            for name, i in numbers.items()
            if i in own["state"]
        }
        trained = [names[id(p)] for p in self._model.parameters() if p.requires_grad]
        told = [self._bring(member, (groups, trained)) for member in range(self._stages.size)]
        states: dict[int, Any] = {}
        whole: dict[str, Any] = {"state": states, "param_groups": [], "names": [], "trained": []}
        if self._first:
            for number, group in enumerate(own["param_groups"]):
                mine = {name for groups, _ in told for name in groups[number]}
                at = sum(len(names) for names in whole["names"])
                whole["names"].append([name for name in self._layout.parameters if name in mine])
                numbered = list(range(at, at + len(mine)))
                more = {"param_names": whole["names"][-1]} if "param_names" in group else {}
                whole["param_groups"].append({**group, "params": numbered, **more})
            every = {name for _, trained in told for name in trained}
            whole["trained"] = [name for name in self._layout.parameters if name in every]
        order = [name for names in whole["names"] for name in names]
        order = self._say(order)
        for number, name in enumerate(order):
            found = self._bring(self._layout.owner(name), state.pop(name, None))
            if found is not None:
                states[number] = found
        return whole

    def _bring(self, member: int, value: Any) -> Any:
        """What a member of the first pipeline has, on the first member; None elsewhere."""
        if not self._tells or member == 0:
            return value if self._first else None
        if self._stages.rank == member:
            told = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
            self._stages.send(torch.tensor([len(told)]), 0)
            for begin in range(0, len(told), _PART_BYTES):
                self._stages.send(told[begin : begin + _PART_BYTES], 0)
        if not self._first:
            return None
        came = torch.empty(int(self._stages.recv(member)), dtype=torch.uint8)
        for begin in range(0, len(came), _PART_BYTES):
            came[begin : begin + _PART_BYTES] = self._stages.recv(member)
        return unpack(came.numpy().data)

    def _host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The whole of it, where it is needed."""
        every = whole(tensor.detach())
        return every.detach().to("cpu", copy=True) if self._tells else None

    def _say(self, names: list[str]) -> list[str]:
        """What the first member of the pipeline says, on all of them."""
        return list(unpack(self._stages.exchange(pack(names) if self._stages.rank == 0 else b"")[0]))

    # ---- and back

    def mine(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Of the whole, what this member holds."""
        if odd := sorted(set(self._layout.saved) ^ state.keys()):
            raise RuntimeError(f"{odd[0]!r} is in only one of the model and its checkpoint")
        return {name: state[name] for name in self._model.state_dict(keep_vars=True)}

    def own_optimizer(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], names: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        """Of an optimizer's state in the checkpoint, that of this member's parameters, with its own numbers."""
        own = names_of(self._model)
        numbers: dict[str, int] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                numbers[own[id(p)]] = len(numbers)
        states: dict[int, Any] = {}
        groups = []
        for saved, called in zip(state["param_groups"], names):
            mine = [(name, i) for name, i in zip(called, saved["params"]) if name in numbers]
            states |= {numbers[name]: state["state"][i] for name, i in mine if i in state["state"]}
            more = {"param_names": [name for name, _ in mine]} if "param_names" in saved else {}
            groups.append({**saved, "params": [numbers[name] for name, _ in mine], **more})
        if missing := sorted(numbers.keys() - {name for called in names for name in called}):
            raise ConfigError(f"the checkpoint's optimizer does not have {missing[0]!r}, which this script's has")
        return {"state": states, "param_groups": groups}


def clip_over_stages(
    models: Sequence[nn.Module], parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Clip gradients to a norm over all stages. What several members hold counts once."""
    pipelines = [(model, pipeline) for model in models if (pipeline := pipeline_of(model))]
    others = {
        id(p)
        for model, pipeline in pipelines
        for name, p in model.named_parameters()
        if pipeline.layout.owner(name) != pipeline.group.rank
    }
    counted = [p.grad for p in parameters if p.grad is not None and id(p) not in others]
    norm = whole(torch.nn.utils.get_total_norm(counted, norm_type))
    if pipelines:
        norms = torch.stack(pipelines[0][1].group.all_gather(norm.detach().double().cpu()))
        norm = torch.linalg.vector_norm(norms, norm_type).to(norm)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
