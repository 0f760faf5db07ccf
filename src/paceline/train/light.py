"""What a newcomer needs of the run's state at once, and what of it may come later or is with the servers.

Light is what a turn may look at before its step: buffers, options of optimizers, what is tracked. Heavy is what nothing
but a step changes: the parameters of the run's models, and what optimizers keep of them.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.train.groups import SavedOptimizer
from paceline.train.saving import Stateful

MODEL = "model."  # before the numbers of the run's models, among the names of what is saved


def split(name: str, part: Stateful, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The light and the heavy half of a part's state; of most parts nothing is heavy: None."""
    if isinstance(part, SavedOptimizer):
        return {**state, "state": {}}, state["state"]
    if not (isinstance(part, torch.nn.Module) and name.startswith(MODEL)):
        return state, None
    parameters = {n for n, _ in part.named_parameters(remove_duplicate=False)}
    light = {n: value for n, value in state.items() if n not in parameters}
    return light, {n: value for n, value in state.items() if n in parameters}


def load_light(part: Stateful, light: dict[str, Any]) -> None:
    """Put the light half in place."""
    if isinstance(part, torch.nn.Module):
        part.load_state_dict(light, strict=False)
    else:
        part.load_state_dict(light)


def load_heavy(part: Stateful, heavy: dict[str, Any]) -> None:
    """Put the other half beside what is there: the turn may have changed options since they came."""
    state = part.state_dict()
    part.load_state_dict({**state, "state": heavy} if isinstance(part, SavedOptimizer) else {**state, **heavy})
