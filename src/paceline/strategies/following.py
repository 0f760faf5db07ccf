"""Float buffers that change in training (batch-norm statistics) and follow the first member, pass by pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
_SMALL_BYTES = 64 << 10  # smaller buffers travel although they have not changed yet; large constants stay at home
_BATCH_NORMS = (torch.nn.modules.batchnorm._NormBase,)


class Following:
    """Those of one model. Until `choose` there are none."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._at_first = {name: (id(b), b._version) for name, b in model.named_buffers()}
        self._chosen: list[tuple[torch.nn.Module, str]] = []

    def __bool__(self) -> bool:
        return bool(self._chosen)

    def changed(self) -> list[str]:
        """The names of those that this member has changed."""
        buffers = self._model.named_buffers()
        return [name for name, b in buffers if self._at_first.get(name) != (id(b), b._version)]

    def choose(self, moved: Iterable[str]) -> None:
        """Take those that some member has changed, and those that may well change."""
        moved = set(moved)
        norms = {id(b) for m in self._model.modules() if isinstance(m, _BATCH_NORMS) for b in m.buffers()}
        names = [
            name
            for name, b in sorted(self._model.named_buffers())
            if b.dtype in _EXACT_IN_FLOAT32 and (id(b) in norms or name in moved or b.nbytes <= _SMALL_BYTES)
        ]
        self._chosen = [(self._model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in names]

    def tensors(self) -> list[torch.Tensor]:
        """Looked up each time: a module may put another tensor in the place of a buffer."""
        return [b for module, name in self._chosen if (b := module._buffers[name]) is not None]
