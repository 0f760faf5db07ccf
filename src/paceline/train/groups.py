"""An optimizer as a checkpoint holds it: its state, and by name which parameters each of its groups has.

A script may add a parameter group in the middle of a run (gradual unfreezing). When that run is resumed, the script
starts with the groups of its beginning, and the epoch in which it added one may not come again: the groups that are
missing are added from the checkpoint. If the script then adds the same parameters once more, that is the same group.
Which parameters are trained (`requires_grad`) comes back too, for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.strategies.replicas import names_of
from paceline.train.optimizer import restored


class SavedOptimizer:
    """`state_dict` and `load_state_dict` of an optimizer whose number of groups may have changed."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        names = names_of(self._model)
        groups = [[names.get(id(p), "") for p in group["params"]] for group in self._optimizer.param_groups]
        trained = [names[id(p)] for p in self._model.parameters() if p.requires_grad]
        return {**self._optimizer.state_dict(), "names": groups, "trained": trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        groups = self._optimizer.param_groups
        by_name = {name: p for p in self._model.parameters() if (name := names_of(self._model).get(id(p)))}
        if "trained" in state:
            for name, p in by_name.items():
                p.requires_grad_(name in state["trained"])
        for names, saved in list(zip(state.get("names", ()), state["param_groups"]))[len(groups) :]:
            if missing := [name for name in names if name not in by_name]:
                raise ConfigError(
                    f"the checkpoint has a parameter group with {missing[0] or 'a parameter that is not the model’s'}, "
                    "which this script's model has not: add that group before run.epochs"
                )
            options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            parameters = [by_name[name] for name in names]
            given = list(zip(saved["param_names"], parameters)) if "param_names" in saved else parameters
            self._optimizer.add_param_group({"params": given, **options})
            restored(self._optimizer).append({id(p) for p in parameters})
        self._optimizer.load_state_dict({key: state[key] for key in ("state", "param_groups")})
