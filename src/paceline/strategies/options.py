"""An optimizer as servers are told of it: the name of its class, and the options of its parameter groups."""

from __future__ import annotations

from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.optim import OPTIMIZERS
from paceline.server.messages import Options
from paceline.server.stock import optimizer_class


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """The class of torch.optim or paceline.optim that this is, by its name: servers look up nothing else."""
    kind: type = type(optimizer)
    if hasattr(optimizer, "_paceline"):  # the run's own subclass of it
        kind = kind.__mro__[1]
    if own := [name for name, each in OPTIMIZERS.items() if each is kind]:
        return own[0]
    if getattr(torch.optim, kind.__name__, None) is not kind:
        raise ConfigError(
            f"servers apply the optimizers of torch.optim and paceline.optim, and {kind.__name__} is another one: use "
            "one of those, or --strategy allreduce, which takes any"
        )
    name: str = kind.__name__
    optimizer_class(name)
    return name


def options_of(optimizer: torch.optim.Optimizer) -> list[Options]:
    """The options of each parameter group, as they travel: the optimizer's own, and not what scripts keep there too."""
    return [
        {key: _plain(group[key], key, number) for key in optimizer.defaults if key in group}
        for number, group in enumerate(optimizer.param_groups)
    ]


def _plain(value: Any, key: str, number: int) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, tuple | list):
        return [_plain(v, key, number) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"parameter group {number} has {key}={value!r}, a {type(value).__name__}, which servers cannot be told: give a "
        "number, or use --strategy allreduce"
    )
