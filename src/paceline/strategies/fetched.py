"""The servers' state while a worker has it: fetched for a checkpoint, stored when a run is resumed.

The optimizer's state lives with the parameters, on the servers. For a checkpoint the first member fetches it into the
user's own optimizer, where a checkpoint finds it; what corrections have learnt goes beside it, by the names of
parameters. At the next push both are out of date, and are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.server.kept import MARK
from paceline.strategies.held import Held


class Fetched:
    """That of one worker."""

    def __init__(self) -> None:
        self.kept: list[dict[str, dict[str, Any]]] = []  # by table and parameter: what corrections keep of it
        self._optimizers: list[torch.optim.Optimizer] = []  # whose state is here

    def fetch(self, tables: Sequence[Held]) -> None:
        """Get all there is."""
        self.forget()
        for each in tables:
            states = each.table.state() if each.table else []
            for p, state in zip(each.parameters, states):
                if own := {key: value for key, value in state.items() if not key.startswith(MARK)}:
                    each.optimizer.state[p] = own
            self._optimizers.append(each.optimizer)
            names = each.table.names if each.table else []
            self.kept.append(
                {n: {k: v for k, v in state.items() if k.startswith(MARK)} for n, state in zip(names, states)}
            )

    def forget(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self._optimizers.clear()
        self.kept = []

    def store(self, tables: Sequence[Held], own: Sequence[dict[str, Any]], *, first: bool) -> None:
        """Models and optimizers are as they were saved: so shall the servers be, which the first member tells. `own` is
        what workers' codecs had left unsaid."""
        for i, each in enumerate(tables):
            if each.table and first:
                each.table.store()
                kept = self.kept[i] if i < len(self.kept) else {}
                each.table.store_state(
                    [
                        each.optimizer.state.get(p, {}) | kept.get(name, {})
                        for p, name in zip(each.parameters, each.table.names)
                    ]
                )
            each.optimizer.state.clear()
            for state in own:
                if each.table and len(state.get("unsaid", ())) > i:
                    each.table.add_unsaid(state["unsaid"][i])
        self.kept = []
