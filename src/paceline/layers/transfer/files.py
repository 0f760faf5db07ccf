"""Load what fits from a file of weights, and say what was done; save a part of a model.

Files are safetensors, or what `torch.save(model.state_dict())` writes; a checkpoint of a run is a directory of them. A
pickle can run code when it is opened, so those are read with `weights_only=True` and refused where they hold anything
but tensors and plain values.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from paceline.core.errors import ConfigError
from paceline.layers.transfer.freezing import is_held
from paceline.layers.transfer.names import meant, near

TRAINABLE = "trainable"
_PICKLED = (b"PK", b"\x80")  # how what torch.save writes begins, now and before 1.6
_UNSAFE = "WeightsUnpickler error:"  # what torch says behind it is the reason
_WRAPPED = ("state_dict", "model_state_dict", "model")  # where scripts put the weights among other things
_CHECKPOINT = ("shared.safetensors", "frozen.safetensors")  # the second where something is frozen
_MODEL = "model.0."
_EXPORT = 'transfer.load(make(), "runs/NAME/checkpoints/step-...")'
_SHOWN = 8  # names of a kind, in words

Rename = Mapping[str, str] | Callable[[str], str]


class Loading(NamedTuple):
    """What became of every name of the model and of the file."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]  # the model has them, the file does not
    other_shape: tuple[str, ...]  # both have them, and they do not fit
    unexpected: tuple[str, ...]  # only the file has them
    shapes: dict[str, str]  # of those that do not fit

    @property
    def whole(self) -> bool:
        """Whether model and file fit each other exactly."""
        return not (self.missing or self.other_shape or self.unexpected)

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded)} of {len(self.loaded) + len(self.missing) + len(self.other_shape)} tensors"]
        for kind in ("missing", "other_shape", "unexpected"):
            names = getattr(self, kind)
            if names:
                told = [f"{n} ({self.shapes[n]})" if n in self.shapes else n for n in names[:_SHOWN]]
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                lines.append(f"{kind.replace('_', ' ')}: {', '.join(told)}{more}")
        return "\n".join(lines)


def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = False,
    rename: Rename | None = None,
    show: Callable[[str], object] | None = print,
) -> Loading:
    """Copy into the model whatever the file has under the same name in the same shape.

    Args:
        strict: whether anything that is missing, of another shape or unexpected is an error.
        rename: the beginnings of names in the file and what they become, such as `{"module.": ""}`, or a function.
        show: is given the report in words; None for silence.

    Raises:
        ConfigError: the file is refused, nothing fits, or (strict) not all does; the model is as it was.
    """
    _refuse_cut(model, "load into the model before run.model(model)")
    found = _renamed(read(path), rename, path)
    wanted = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if lazy := [name for name, value in wanted.items() if is_lazy(value)]:
        raise ConfigError(f"{lazy[0]} has no shape yet: pass a batch through the model before loading")
    if empty := [name for name, value in wanted.items() if value.is_meta]:
        raise ConfigError(
            f"{empty[0]} is on the meta device and holds no values: call model.to_empty(device=...) before loading, or "
            "make the model elsewhere"
        )
    both = [name for name in wanted if name in found]
    shapes = {name: _difference(wanted[name], found[name]) for name in both}
    places = {wanted[name].data_ptr() for name in both if not shapes[name] and wanted[name].numel()}
    done = Loading(
        loaded=tuple(name for name in both if not shapes[name]),
        missing=tuple(
            n for n in wanted if n not in found and wanted[n].data_ptr() not in places
        ),  # tied: once in a file
        other_shape=tuple(name for name in both if shapes[name]),
        unexpected=tuple(name for name in found if name not in wanted),
        shapes={name: told for name, told in shapes.items() if told},
    )
    if not done.loaded:
        hint = (
            f"; {done.unexpected[0]!r}: {near(done.unexpected[0], wanted)}. rename= maps names"
            if done.unexpected
            else ""
        )
        raise ConfigError(f"nothing in {path} fits the model{hint}\n{done}")
    if strict and not done.whole:
        raise ConfigError(f"{path} and the model do not fit; strict=False loads the part that does\n{done}")
    with torch.no_grad():
        for name in done.loaded:
            wanted[name].copy_(found[name])
    if show is not None:
        show(str(done))
    return done


def save(model: nn.Module, path: str | os.PathLike[str], *, only: str | Sequence[str] = "*") -> list[str]:
    """Write tensors of the model as safetensors, whole or not at all; returns their names.

    Args:
        only: patterns of names, or `"trainable"`: what is trained, with the running statistics that go along.
    """
    _refuse_cut(model, f"load a checkpoint of the run into a whole model, and save that: {_EXPORT}")
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if only == TRAINABLE:
        chosen = _trained(model)
        if not chosen:
            raise ConfigError('only="trainable": no parameter of the model is trained')
    else:
        found = meant(model, [only] if isinstance(only, str) else list(only))
        chosen = set(found.parameters)
        for name, module in found.modules.items():
            chosen |= {f"{name}.{own}" for own, _ in module.named_buffers(recurse=False)}
    if only == "*":
        chosen = set(state)
    kept = {name: value for name, value in state.items() if name in chosen}
    write(kept, path)
    return list(kept)


def _refuse_cut(model: nn.Module, instead: str) -> None:
    """A member of a run with a mesh has a part of the model only: layers, or pieces of tensors."""
    pieces = any(hasattr(p, "_local_tensor") for p in model.parameters())
    if pieces or "_paceline_pipeline" in vars(model):
        raise ConfigError(f"this model is cut over members, and this one has a part of it: {instead}")


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file of either kind, on the CPU; which kind it is, is seen from its first bytes.

    A directory is a checkpoint of a run: its first model is read.
    """
    if Path(path).is_dir():
        return _of_checkpoint(Path(path))
    try:
        with Path(path).open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if start[8:9] == b"{":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise ConfigError(f"{path} is not a whole safetensors file: {error}") from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not start.startswith(_PICKLED):
            raise ConfigError(f"{path} is neither safetensors nor a state dict of torch") from None
        told = next((line for line in str(error).splitlines() if _UNSAFE in line), "").partition(_UNSAFE)[2].strip()
        raise ConfigError(
            f"{path} is refused: it holds more than tensors, and opening it could run code. Where you trust it, "
            f"load it yourself and write the weights with safetensors.torch.save_file" + (f" ({told})" if told else "")
        ) from None
    except Exception as error:  # garbage may raise anything in the unpickler
        raise ConfigError(f"{path} is neither safetensors nor a state dict of torch: {error}") from None
    return _tensors(state, path)


def _of_checkpoint(directory: Path) -> dict[str, Tensor]:
    files = [directory / name for name in _CHECKPOINT if (directory / name).exists()]
    if not files or files[0].name != _CHECKPOINT[0]:
        raise ConfigError(
            f"{directory} is no checkpoint: name one, such as runs/NAME/checkpoints/step-00000120, or a file"
        )
    tensors = {name: value for file in files for name, value in read(file).items()}
    found = {name.removeprefix(_MODEL): value for name, value in tensors.items() if name.startswith(_MODEL)}
    if not found:
        raise ConfigError(f"{directory} has no model in it")
    return found


def write(state: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Write these tensors as one safetensors file, whole or not at all."""
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"{path} is a directory: name a file in it, such as {target / 'model.safetensors'}")
    if empty := [name for name, value in state.items() if value.is_meta]:
        raise ConfigError(f"{empty[0]} is on the meta device and holds no values to write")
    seen: set[int] = set()
    tensors = {}
    for name, value in state.items():
        flat = value.detach().cpu().contiguous()
        storage = flat.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != flat.nbytes:  # tied, or a part of something larger
            flat = flat.clone()
        seen.add(storage.data_ptr())
        tensors[name] = flat
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        safetensors.torch.save_file(tensors, draft, {"format": "pt", **(metadata or {})})
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _tensors(state: Any, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    if isinstance(state, Mapping):
        if state and all(isinstance(value, Tensor) for value in state.values()):
            return dict(state)
        inner = [key for key in _WRAPPED if isinstance(state.get(key), Mapping)]
        if len(inner) == 1:
            return {name: value for name, value in state[inner[0]].items() if isinstance(value, Tensor)}
        told = f"a dictionary with {', '.join(map(repr, list(state)[:_SHOWN]))}"
    else:
        told = f"a {type(state).__name__}"
    raise ConfigError(f"{path} holds {told}; a state dict is wanted, or one under {' or '.join(map(repr, _WRAPPED))}")


def _renamed(found: dict[str, Tensor], rename: Rename | None, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    if rename is None:
        return found
    if isinstance(rename, Mapping):
        for old in rename:
            if not any(name.startswith(old) for name in found):
                raise ConfigError(f"rename={old!r}: no name in {path} begins so; {near(old, found)}")
    result: dict[str, Tensor] = {}
    for name, value in found.items():
        new = rename(name) if callable(rename) else _with_beginning(name, rename)
        if new in result:
            raise ConfigError(f"rename= gives two tensors of {path} the name {new!r}")
        result[new] = value
    return result


def _with_beginning(name: str, rename: Mapping[str, str]) -> str:
    for old in sorted(rename, key=len, reverse=True):  # the longest that fits
        if name.startswith(old):
            return rename[old] + name[len(old) :]
    return name


def _difference(wanted: Tensor, found: Tensor) -> str:
    """Why one cannot be copied into the other; "" where it can."""
    if wanted.shape != found.shape:
        return f"{_size(found)} in the file, {_size(wanted)} in the model"
    if wanted.is_floating_point() != found.is_floating_point() or wanted.is_complex() != found.is_complex():
        return f"{found.dtype} in the file, {wanted.dtype} in the model"
    return ""


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"


def _trained(model: nn.Module) -> set[str]:
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    for name, module in model.named_modules(remove_duplicate=False):
        changes = any(p.requires_grad for p in module.parameters(recurse=False))
        drifts = isinstance(module, _NormBase) and not is_held(module)  # whatever becomes of its parameters
        if names and (changes or drifts):
            names |= {f"{name}.{own}" if name else own for own, _ in module.named_buffers(recurse=False)}
    return names
