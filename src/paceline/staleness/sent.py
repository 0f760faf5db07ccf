"""What each worker was sent last: the weights that its next gradient belongs to, one copy of the model per worker."""

from __future__ import annotations

from typing import Any

import torch


class Sent:
    """Copies by worker and key, in the type of the weights."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, key: str, weights: torch.Tensor, worker: int) -> None:
        pieces = self._pieces.setdefault(worker, {})
        if key in pieces:
            pieces[key].copy_(weights)
        else:
            pieces[key] = weights.clone()

    def get(self, key: str, worker: int) -> torch.Tensor | None:
        return self._pieces.get(worker, {}).get(key)

    def forget(self, worker: int) -> None:
        self._pieces.pop(worker, None)

    def state_dict(self) -> dict[str, Any]:
        return {str(worker): dict(pieces) for worker, pieces in self._pieces.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pieces = {int(worker): {k: t.clone() for k, t in pieces.items()} for worker, pieces in state.items()}
