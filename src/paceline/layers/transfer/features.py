"""What the frozen part of a model makes of a dataset, computed once and kept on disk.

    DIRECTORY/features-00.safetensors …   blocks of neighbouring samples, at most 64

Members of a run each compute the blocks that nobody has yet; those who do not see the others' files get the blocks over
the wire. So a directory may be one for all hosts or one for each, a run that was killed goes on from the blocks that
are there, and afterwards every member can read every sample: `run.loader` shuffles them over all members as ever. Files
are mapped, so features need not fit into memory.

Each block carries a fingerprint: of the cut, of the weights and buffers of all modules that ran up to it, and of eight
of the samples: a change in others is not seen. Where it is another one than now, the file is stale and refused; it is
never made anew unasked, since that may take hours and somebody may want the old one.
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
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from paceline.core.errors import ConfigError
from paceline.layers.transfer.blocks import Alone, Members, exchange, gathered
from paceline.layers.transfer.cutting import at_rest, named, outputs, placed, rows_of, watching
from paceline.layers.transfer.files import write
from paceline.layers.transfer.freezing import is_held

_BLOCKS = 64
_LOOKED_AT = 8  # samples in the fingerprint
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
        ConfigError: what the directory has was made with other weights, another cut or other samples; samples come out
            otherwise at each drawing, or the frozen part computes something else at each pass.
    """
    cuts = [cut] if isinstance(cut, str) else list(cut)
    members: Members = run if run is not None else Alone()
    num = _length(dataset)
    count = min(num, _BLOCKS)
    count = -(-num // -(-num // count))  # of equal length but for the last
    paths = [Path(directory) / f"features-{i:02d}.safetensors" for i in range(count)]
    failed: ConfigError | None = None
    about: dict[str, Any] = {}
    dropouts: list[str] = []
    try:
        about, dropouts = _about(model, cuts, dataset)
        _refuse_stale([path for path in paths if path.exists()], Path(directory), about)
    except ConfigError as error:
        failed = error
    print_of = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()
    have = gathered(members, [path.exists() for path in paths], print_of, failed)
    if dropouts and members.rank == 0:
        more = ", …" if len(dropouts) > 4 else ""
        print(f"features: dropout is off in what is kept ({', '.join(dropouts[:4])}{more})")
    missing = [i for i in range(count) if not any(own[i] for own in have)]
    try:
        per = -(-num // count)
        for i in missing[members.rank :: members.size]:
            part = Subset(dataset, range(i * per, min(num, (i + 1) * per)))
            write(_computed(model, cuts, part, batch_size), paths[i], {_ABOUT: json.dumps(about)})
    except (ConfigError, OSError) as error:
        failed = ConfigError(str(error))
    exchange(members, paths, print_of, failed)
    return Features(paths, about)


def _about(model: nn.Module, cuts: Sequence[str], dataset: Any) -> tuple[dict[str, Any], list[str]]:
    """The fingerprint, for which some samples are drawn and computed twice; and where there is dropout."""
    modules = {name: named(model, name) for name in cuts}
    first, second = _samples(dataset), _samples(dataset)
    if first != second:
        raise ConfigError(
            "the same samples came out otherwise when drawn again, as with random crops or noise: one draw would be "
            "kept for ever. Give features the dataset without what is random"
        )
    batch = default_collate([dataset[0]])
    alone = not isinstance(batch, tuple | list)
    x = placed(batch if alone else batch[0], _device(model))
    with at_rest(model), watching(model) as ran:
        once, again = outputs(model, modules, x), outputs(model, modules, x)
    for name in cuts:
        if len(once[name]) != rows_of(x):
            raise ConfigError(
                f"{name!r} returns {len(once[name])} rows for {rows_of(x)} samples: a row for each is wanted"
            )
        if not torch.equal(once[name], again[name]):
            raise ConfigError(
                f"{name!r} gave other values for the same sample, in eval mode: its outputs cannot be kept"
            )
    about = {"cuts": list(cuts), "num": len(dataset), "alone": alone, "samples": first}
    about["weights"] = _weights(_state(model, cuts, ran))
    return about, _refuse_moving(model, cuts, ran)


def _refuse_moving(model: nn.Module, cuts: Sequence[str], ran: set[str]) -> list[str]:
    """What runs up to the cuts must give the same in later epochs as now; returns where there is dropout."""
    trained = [n for n, p in _state(model, cuts, ran).items() if p.requires_grad]
    if trained:
        raise ConfigError(
            f"{trained[0]} lies before {cuts[0]!r} and is trained, so its outputs change: freeze it first"
        )
    off = []
    for name in sorted(ran):
        module = model.get_submodule(name)
        if isinstance(module, _NormBase) and module.training and not is_held(module) and module.track_running_stats:
            raise ConfigError(
                f"{name} is a norm in training mode before {cuts[0]!r}: its statistics go on changing. Freeze it with "
                "transfer.freeze, or call model.eval() first"
            )
        if isinstance(module, _DropoutNd) and module.training and module.p:
            off.append(name)
    return off


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
        if then != about:
            raise _stale(path, "from other samples")


def _computed(model: nn.Module, cuts: Sequence[str], dataset: Dataset[Any], batch_size: int) -> dict[str, Tensor]:
    modules, device = {name: named(model, name) for name in cuts}, _device(model)
    parts: list[list[Tensor]] = []
    with at_rest(model):
        for batch in DataLoader(dataset, batch_size=batch_size):
            x, *labels = batch if isinstance(batch, tuple | list) else [batch]
            out = outputs(model, modules, placed(x, device))
            labels = [label if isinstance(label, Tensor) else torch.tensor(label) for label in labels]
            parts.append([*(out[name].cpu() for name in cuts), *labels])
    return {str(i): torch.cat(column) for i, column in enumerate(zip(*parts))}


def _columns(path: Path) -> list[Tensor]:
    with safetensors.safe_open(path, "pt") as file:  # mapped: what is not looked at is not read
        return [file.get_tensor(name) for name in sorted(file.keys(), key=int)]


def _stale(path: Path, how: str) -> ConfigError:
    return ConfigError(f"{path} is stale, it was made {how}: remove its directory, or name another one")


def _state(model: nn.Module, cuts: Sequence[str], ran: set[str]) -> dict[str, Tensor]:
    """Parameters and buffers of what ran: of modules around the cut their own, of others all that is in them."""
    found: dict[str, Tensor] = {}
    for name in ran:
        module = model.get_submodule(name)
        around = not name or any(cut.startswith(f"{name}.") for cut in cuts)
        for kind in (module.named_parameters, module.named_buffers):
            found |= {f"{name}.{own}" if name else own: value for own, value in kind(recurse=not around)}
    return found


def _weights(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        _add(digest, value)
    return digest.hexdigest()


def _samples(dataset: Any) -> str:
    num = len(dataset)
    digest = hashlib.sha256(str(num).encode())
    for index in sorted({i * (num - 1) // (_LOOKED_AT - 1) for i in range(_LOOKED_AT)}):
        batch = default_collate([dataset[index]])
        for value in batch if isinstance(batch, tuple | list) else [batch]:
            for each in value.values() if isinstance(value, dict) else [value]:
                _add(digest, torch.as_tensor(each))
    return digest.hexdigest()


def _add(digest: Any, value: Tensor) -> None:
    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _length(dataset: Any) -> int:
    num = len(dataset) if hasattr(dataset, "__len__") else 0
    if not num:
        raise ConfigError("features need a dataset with a length, and at least one sample in it")
    return num
