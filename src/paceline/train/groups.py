"""An optimizer as a checkpoint holds it: its state, and by name which parameters each of its groups has.

A script may add a parameter group in the middle of a run (gradual unfreezing). When that run is resumed, the script
starts with the groups of its beginning, and the epoch in which it added one may not come again: the groups that are
missing are added from the checkpoint. If the script then adds the same parameters once more, that is the same group.
Which parameters are trained (`requires_grad`) comes back too, for the same reason, with a warning where the script has
set it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.parallel.cut import Cut
from paceline.parallel.scaling import Scaling
from paceline.strategies.replicas import names_of
from paceline.train.optimizer import restored


class SavedOptimizer:
    """`state_dict` and `load_state_dict` of an optimizer whose number of groups may have changed."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        warn: Callable[[str], None],
        scaling: Scaling | None = None,
        cut: Cut | None = None,
    ) -> None:
        self._cut = cut  # where this member has parts of the tensors
        self._optimizer = optimizer
        self._model = model
        self._warn = warn
        self._scaling = scaling  # of the losses of fp16

    def state_dict(self) -> dict[str, Any]:
        names = names_of(self._model)
        groups = [[names.get(id(p), "") for p in group["params"]] for group in self._optimizer.param_groups]
        trained = [names[id(p)] for p in self._model.parameters() if p.requires_grad]
        whole = self._cut.state_of(self._optimizer) if self._cut else {}
        state = {**self._optimizer.state_dict(), "names": groups, "trained": trained, **whole}
        return {**state, "scaling": self._scaling.state_dict()} if self._scaling else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        groups = self._optimizer.param_groups
        named = names_of(self._model)
        by_name = {named[id(p)]: p for p in self._model.parameters()}
        if "trained" in state:
            self._set_trained(by_name, set(state["trained"]))
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
        own = {key: state[key] for key in ("state", "param_groups")}
        if self._cut:
            own = self._cut.load_optimizer(self._optimizer, own, state.get("names", ()))
        self._optimizer.load_state_dict(own)
        if self._scaling and "scaling" in state:
            self._scaling.load_state_dict(state["scaling"])

    def _set_trained(self, by_name: dict[str, torch.nn.Parameter], trained: set[str]) -> None:
        for train, done in (True, "trained"), (False, "frozen"):
            changed = [n for n, p in by_name.items() if (n in trained) is train and p.requires_grad is not train]
            for name in changed:
                by_name[name].requires_grad_(train)
            if changed:
                more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
                self._warn(
                    f"{', '.join(changed[:5])}{more}: {done} as in the checkpoint, not as this script has set it "
                    "before run.epochs. To change what is trained in a run that is resumed, set requires_grad within "
                    "the loop over run.epochs"
                )
