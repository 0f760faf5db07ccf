"""What the frozen part of a model makes of a dataset, computed once and kept on disk.

The file is safetensors; while it is made, all features are in memory once. It carries a fingerprint: of the cut, of the
weights and buffers of all modules that ran up to it, and of eight of the samples: a change in others is not seen. Where
it is another one than now, the file is stale and refused; it is never made anew unasked, since that may take hours and
somebody may want the old one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from paceline.core.errors import ConfigError
from paceline.layers.transfer.cutting import at_rest, named, outputs, watching
from paceline.layers.transfer.files import write

FILE = "features.safetensors"
_LOOKED_AT = 8  # samples in the fingerprint
_ABOUT = "paceline.features"  # in the metadata


class Features(Dataset[Any]):
    """Samples as the dataset gives them, with the cut's output in place of the input."""

    def __init__(self, path: Path, columns: Sequence[Tensor], alone: bool) -> None:
        self.path = path
        self.columns = columns  # features first
        self.alone = alone  # whether a sample is an input without a label

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        if self.alone:
            return self.columns[0][index]
        return tuple(column[index] for column in self.columns)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        rows = [column[indices] for column in self.columns]
        return list(rows[0]) if self.alone else list(zip(*rows))


def features(
    model: nn.Module, cut: str, dataset: Dataset[Any], directory: str | os.PathLike[str], *, batch_size: int = 256
) -> Features:
    """The outputs of the module `cut` for every sample, from the directory or computed now, in eval mode.

    Args:
        cut: the name of a module. What runs up to it must be frozen.
        dataset: with a length; samples are inputs, or tuples of an input and labels. Random transforms do not belong
            here: one draw would be kept for ever.
        directory: is made where it is not there, and holds one such file.

    Raises:
        ConfigError: what the directory has was made with other weights, another cut or other samples.
    """
    named(model, cut)
    num = _length(dataset)
    path = Path(directory) / FILE
    if not path.exists():
        _make(model, cut, dataset, path, batch_size)
    about, columns = _open(path)
    if about["cut"] != cut:
        raise _stale(path, f"at the cut {about['cut']!r}, not {cut!r}")
    modules = dict(model.named_modules())
    if not set(about["ran"]) <= set(modules) or about["weights"] != _weights(model, cut, about["ran"]):
        raise _stale(path, "with other weights")
    if len(columns[0]) != num or about["samples"] != _samples(dataset):
        raise _stale(path, "from other samples (or they are transformed at random)")
    return Features(path, columns, about["alone"])


def _make(model: nn.Module, cut: str, dataset: Dataset[Any], path: Path, batch_size: int) -> None:
    module = named(model, cut)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    parts: list[list[Tensor]] = []
    alone = False
    with at_rest(model), watching(model) as ran:
        for batch in DataLoader(dataset, batch_size=batch_size):
            alone = isinstance(batch, Tensor)
            x, *labels = [batch] if alone else batch
            out = outputs(model, {cut: module}, x.to(device))[cut].cpu()
            if len(out) != len(x):
                raise ConfigError(f"{cut!r} returns {len(out)} rows for {len(x)} samples: a row for each is wanted")
            parts.append([out, *(label if isinstance(label, Tensor) else torch.tensor(label) for label in labels)])
    trained = [n for n, p in _state(model, cut, ran).items() if p.requires_grad]
    if trained:
        raise ConfigError(f"{trained[0]} lies before {cut!r} and is trained, so its outputs change: freeze it first")
    about: dict[str, Any] = {"cut": cut, "ran": sorted(ran), "alone": alone, "samples": _samples(dataset)}
    about["weights"] = _weights(model, cut, about["ran"])
    columns = {str(i): torch.cat(column) for i, column in enumerate(zip(*parts))}
    write(columns, path, {_ABOUT: json.dumps(about)})


def _open(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})[_ABOUT])
            return about, [file.get_tensor(name) for name in sorted(file.keys(), key=int)]
    except (safetensors.SafetensorError, KeyError):
        raise ConfigError(f"{path} is no file of transfer.features, or not whole: remove it") from None


def _stale(path: Path, how: str) -> ConfigError:
    return ConfigError(f"{path} is stale, it was made {how}: remove it, or name another directory")


def _state(model: nn.Module, cut: str, ran: set[str] | Sequence[str]) -> dict[str, Tensor]:
    """Parameters and buffers of what ran: of modules around the cut their own, of others all that is in them."""
    found: dict[str, Tensor] = {}
    for name in ran:
        module = model.get_submodule(name)
        around = not name or cut.startswith(f"{name}.")
        for kind in (module.named_parameters, module.named_buffers):
            found |= {f"{name}.{own}" if name else own: value for own, value in kind(recurse=not around)}
    return found


def _weights(model: nn.Module, cut: str, ran: Sequence[str]) -> str:
    digest = hashlib.sha256(cut.encode())
    for name, value in sorted(_state(model, cut, ran).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        _add(digest, value)
    return digest.hexdigest()


def _samples(dataset: Any) -> str:
    num = len(dataset)
    digest = hashlib.sha256(str(num).encode())
    for index in sorted({i * (num - 1) // (_LOOKED_AT - 1) for i in range(_LOOKED_AT)}):
        batch = default_collate([dataset[index]])
        for value in [batch] if isinstance(batch, Tensor) else batch:
            _add(digest, torch.as_tensor(value))
    return digest.hexdigest()


def _add(digest: Any, value: Tensor) -> None:
    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _length(dataset: Any) -> int:
    num = len(dataset) if hasattr(dataset, "__len__") else 0
    if not num:
        raise ConfigError("features need a dataset with a length, and at least one sample in it")
    return num
