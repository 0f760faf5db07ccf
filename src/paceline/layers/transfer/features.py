"""What the frozen part of a model makes of a dataset, computed once and kept on disk.

    DIRECTORY/features-00.safetensors …   blocks of neighbouring samples, at most 64

Members of a run each compute the blocks that nobody has yet; those who do not see the others' files get the blocks over
the wire. So a directory may be one for all hosts or one for each, a run that was killed goes on from the blocks that
are there, and afterwards every member can read every sample: `run.loader` shuffles them over all members as ever. Files
are mapped, so features need not fit into memory.

Each block carries a fingerprint (see there). Where it is another one than now, or where the first sample that is there
comes out otherwise than it was kept, as after an edit of a forward pass, the file is stale and refused; it is never
made anew unasked, since that may take hours and somebody may want the old one.
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
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from paceline.core.errors import ConfigError
from paceline.layers.transfer.blocks import Alone, Members, exchange, gathered
from paceline.layers.transfer.cutting import named, placed
from paceline.layers.transfer.files import write
from paceline.layers.transfer.fingerprint import computed, device_of, fingerprint

_BLOCKS = 64
_NEAR, _NEAR_HALF = 1e-2, 1e-1  # how far rounding may move an output, of the largest one
_ABOUT = "paceline.features"  # in the metadata


class Features(Dataset[Any]):
    """Samples as the dataset gives them, with the outputs of the cuts in place of the input."""

    def __init__(self, paths: Sequence[Path], about: dict[str, Any]) -> None:
        self.paths = list(paths)
        self.alone = bool(about["alone"]) and len(about["cuts"]) == 1  # whether a sample is one tensor
        self._num = int(about["num"])
        self._per = -(-self._num // len(paths))
        self._blocks = [_columns(path) for path in paths]  # features first

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Any:
        if not -self._num <= index < self._num:
            raise IndexError(f"sample {index} of {self._num}")
        block, row = divmod(index % self._num, self._per)
        found = tuple(column[row] for column in self._blocks[block])
        return found[0] if self.alone else found

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def features(
    model: nn.Module,
    cut: str | Sequence[str],
    dataset: Dataset[Any],
    directory: str | os.PathLike[str],
    *,
    run: Members | None = None,
    batch_size: int = 256,
) -> Features:
    """The outputs of the module `cut` for every sample, from the directory or computed now, in eval mode.

    Args:
        cut: the name of a module, or of several; a sample then has the output of each, before its labels. What runs up
            to them must be frozen.
        dataset: with a length; samples are inputs, or tuples of an input and labels. An input is a tensor, or a dict of
            tensors by the names of the model's arguments.
        directory: is made where it is not there, and holds the features of one dataset.
        run: what `paceline.join()` returned; all its members call this, and share the work.

    Raises:
        ConfigError: what the directory has was made with other weights or modules, another cut or other samples;
            samples are no tensors and numbers, or come out otherwise at each drawing; or the frozen part computes
            something else at each pass.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: at least one sample at a time is wanted")
    cuts = [cut] if isinstance(cut, str) else list(cut)
    members: Members = run if run is not None else Alone()
    num = _length(dataset)
    per = -(-num // min(num, _BLOCKS))  # samples of a block; the last one may have fewer
    count = -(-num // per)
    paths = [Path(directory) / f"features-{i:02d}.safetensors" for i in range(count)]
    failed: ConfigError | None = None
    about: dict[str, Any] = {}
    dropouts: list[str] = []
    try:
        about, dropouts = fingerprint(model, cuts, dataset)
        found = [i for i, path in enumerate(paths) if path.exists()]
        _refuse_stale([paths[i] for i in found], Path(directory), about)
        if found:
            _refuse_changed(model, cuts, dataset[found[0] * per], paths[found[0]])
    except ConfigError as error:
        failed = error
    print_of = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()
    have = gathered(members, [path.exists() for path in paths], print_of, failed)
    if dropouts and members.rank == 0:
        more = ", …" if len(dropouts) > 4 else ""
        print(f"features: dropout is off in what is kept ({', '.join(dropouts[:4])}{more})")
    missing = [i for i in range(count) if not any(own[i] for own in have)]
    try:
        for i in missing[members.rank :: members.size]:
            part = Subset(dataset, range(i * per, min(num, (i + 1) * per)))
            write(_computed(model, cuts, part, batch_size), paths[i], {_ABOUT: json.dumps(about)})
    except (ConfigError, OSError, RuntimeError, TypeError, ValueError) as error:  # such as labels of several lengths
        failed = ConfigError(f"features cannot be computed or written: {error}")
        failed.__cause__ = error
    exchange(members, paths, print_of, failed)
    return Features(paths, about)


def _refuse_stale(found: Sequence[Path], directory: Path, about: dict[str, Any]) -> None:
    if not found and directory.is_dir() and (odd := sorted(directory.glob("features*.safetensors"))):
        raise _stale(odd[0], "from other samples")
    for path in found:
        try:
            with safetensors.safe_open(path, "pt") as file:
                then = json.loads((file.metadata() or {})[_ABOUT])
        except (safetensors.SafetensorError, KeyError, ValueError):
            raise ConfigError(f"{path} is no file of transfer.features, or not whole: remove it") from None
        if then.get("cuts") != about["cuts"]:
            told = ", ".join(map(repr, then.get("cuts", ["?"])))
            raise _stale(path, f"at the cut {told}, not {', '.join(map(repr, about['cuts']))}")
        if then.get("weights") != about["weights"]:
            raise _stale(path, "with other weights")
        if then.get("modules") != about["modules"]:
            raise _stale(path, "by other modules, or by the same with other settings")
        if then != about:
            raise _stale(path, "from other samples")


def _refuse_changed(model: nn.Module, cuts: Sequence[str], sample: Any, path: Path) -> None:
    """The first sample of a file must come out as it was kept, but for rounding, which batches and devices change."""
    batch = default_collate([sample])
    x = placed(batch[0] if isinstance(batch, tuple | list) else batch, device_of(model))
    now = computed(model, {name: named(model, name) for name in cuts}, x)
    for name, kept in zip(cuts, _columns(path)):
        a, b = now[name][0].cpu().double(), kept[0].double()
        near = _NEAR if kept.dtype in (torch.float32, torch.float64) else _NEAR_HALF
        if a.shape != b.shape or not torch.allclose(a, b, near, near * float(b.nan_to_num(0, 0, 0).abs().max()), True):
            raise _stale(path, f"by another forward pass: {name!r} now gives other values for the same sample")


def _computed(model: nn.Module, cuts: Sequence[str], dataset: Dataset[Any], batch_size: int) -> dict[str, Tensor]:
    modules, device = {name: named(model, name) for name in cuts}, device_of(model)
    parts: list[list[Tensor]] = []
    for batch in DataLoader(dataset, batch_size=batch_size):
        x, *labels = batch if isinstance(batch, tuple | list) else [batch]
        out = computed(model, modules, placed(x, device))
        parts.append([*(out[name].cpu() for name in cuts), *labels])
    return {str(i): torch.cat(column) for i, column in enumerate(zip(*parts))}


def _columns(path: Path) -> list[Tensor]:
    with safetensors.safe_open(path, "pt") as file:  # mapped: what is not looked at is not read
        return [file.get_tensor(name) for name in sorted(file.keys(), key=int)]


def _stale(path: Path, how: str) -> ConfigError:
    return ConfigError(f"{path} is stale, it was made {how}: remove its directory, or name another one")


def _length(dataset: Any) -> int:
    num = len(dataset) if hasattr(dataset, "__len__") else 0
    if not num:
        raise ConfigError("features need a dataset with a length, and at least one sample in it")
    return num
