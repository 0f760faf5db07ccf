"""Train PyTorch models across whatever machines you have: ordinary networks, machines that come and go.

    run = paceline.join()
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = run.loader(dataset, batch_size=64)
    for epoch in run.epochs(10): ...

Importing the package is cheap: torch is loaded when something that needs it is first touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import layers, optim
    from paceline.core.errors import ConfigError, Interrupted, Lost, MemberFailed, PacelineError
    from paceline.launch.calling import launch
    from paceline.layers import transfer
    from paceline.parallel.memory import memory_plan
    from paceline.server.outside.outsider import connect
    from paceline.strategies import (
        AllReduce,
        Async,
        AsyncLocal,
        Average,
        Bounded,
        DiLoCo,
        Guest,
        Local,
        PostLocal,
        SparseLoCo,
        Sync,
        Zero,
    )
    from paceline.train.join import join
    from paceline.train.run import Run

__version__ = "0.1.0"

_WHERE = {
    "connect": "paceline.server.outside.outsider",
    "join": "paceline.train.join",
    "memory_plan": "paceline.parallel.memory",
    "Run": "paceline.train.run",
    "AllReduce": "paceline.strategies",
    "Async": "paceline.strategies",
    "AsyncLocal": "paceline.strategies",
    "Average": "paceline.strategies",
    "Bounded": "paceline.strategies",
    "DiLoCo": "paceline.strategies",
    "Guest": "paceline.strategies",
    "Local": "paceline.strategies",
    "PostLocal": "paceline.strategies",
    "SparseLoCo": "paceline.strategies",
    "Sync": "paceline.strategies",
    "Zero": "paceline.strategies",
    "PacelineError": "paceline.core.errors",
    "ConfigError": "paceline.core.errors",
    "Interrupted": "paceline.core.errors",
    "Lost": "paceline.core.errors",
    "MemberFailed": "paceline.core.errors",
    "launch": "",
    "layers": "",
    "optim": "",
    "transfer": "paceline.layers",
}

__all__ = [
    "AllReduce",
    "Async",
    "AsyncLocal",
    "Average",
    "Bounded",
    "ConfigError",
    "DiLoCo",
    "Guest",
    "Interrupted",
    "Local",
    "Lost",
    "MemberFailed",
    "PacelineError",
    "PostLocal",
    "Run",
    "SparseLoCo",
    "Sync",
    "Zero",
    "connect",
    "join",
    "launch",
    "layers",
    "memory_plan",
    "optim",
    "transfer",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    where = _WHERE[name]
    return getattr(importlib.import_module(where), name) if where else importlib.import_module(f"paceline.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
