"""What features on disk were made of: the cut, the modules and weights that ran up to it, and the samples.

Two fingerprints are equal where features would be, as far as can be told without computing them all: of the samples
eight are looked at, and of a module its class and what it prints of itself, not the code of its forward pass. What will
not come out the same in later epochs has no fingerprint, and is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import default_collate

from paceline.core.errors import ConfigError
from paceline.layers.transfer.cutting import at_rest, named, outputs, placed, rows_of, watching
from paceline.layers.transfer.freezing import is_held

_LOOKED_AT = 8  # samples


def fingerprint(model: nn.Module, cuts: Sequence[str], dataset: Any) -> tuple[dict[str, Any], list[str]]:
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
    x = placed(batch if alone else batch[0], device_of(model))
    with watching(model) as ran:
        once, again = computed(model, modules, x), computed(model, modules, x)
    for name in cuts:
        if len(once[name]) != rows_of(x):
            raise ConfigError(
                f"{name!r} returns {len(once[name])} rows for {rows_of(x)} samples: a row for each is wanted"
            )
        if not bool(((once[name] == again[name]) | (once[name].isnan() & again[name].isnan())).all()):
            raise ConfigError(
                f"{name!r} gave other values for the same sample, in eval mode: its outputs cannot be kept"
            )
    about = {"cuts": list(cuts), "num": len(dataset), "alone": alone, "samples": first}
    about["weights"] = _weights(_state(model, cuts, ran))
    about["modules"] = _modules(model, cuts, ran)
    return about, _refuse_moving(model, cuts, ran)


def computed(model: nn.Module, modules: Mapping[str, nn.Module], x: Any) -> dict[str, Tensor]:
    """The outputs of these modules, in eval mode; an input that the model does not take is the caller's error."""
    try:
        with at_rest(model):
            return outputs(model, modules, x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        given = {n: tuple(v.shape) for n, v in x.items()} if isinstance(x, Mapping) else tuple(x.shape)
        raise ConfigError(f"the model does not take inputs of shape {given}: {error}") from error


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


def _state(model: nn.Module, cuts: Sequence[str], ran: set[str]) -> dict[str, Tensor]:
    """Parameters and buffers of what ran: of modules around the cut their own, of others all that is in them."""
    found: dict[str, Tensor] = {}
    for name in ran:
        module = model.get_submodule(name)
        around = not name or any(cut.startswith(f"{name}.") for cut in cuts)
        for kind in (module.named_parameters, module.named_buffers):
            found |= {f"{name}.{own}" if name else own: value for own, value in kind(recurse=not around)}
    return found


def _modules(model: nn.Module, cuts: Sequence[str], ran: set[str]) -> str:
    """By class and settings: an activation, a stride or an epsilon changes what comes out, and no weight."""
    found = set()
    for name in ran:
        around = not name or any(cut.startswith(f"{name}.") for cut in cuts)
        for own, module in [("", model.get_submodule(name))] if around else model.get_submodule(name).named_modules():
            settings = "" if isinstance(module, _DropoutNd) else module.extra_repr()  # dropout is off
            found.add(f"{name}.{own}".strip(".") + f" {type(module).__name__}({settings})")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


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
        x, *labels = batch if isinstance(batch, tuple | list) else [batch]
        for value in [*(x.values() if isinstance(x, Mapping) else [x]), *labels]:
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"sample {index} has a {_kind(value)} in it: features keeps tensors and numbers, and an input may "
                    "be a dict of tensors. Number the classes, and give each label a place of its own in the tuple"
                )
            _add(digest, value)
    return digest.hexdigest()


def _kind(value: Any) -> str:
    """What is in a batch of one, as the sample had it."""
    first = value[0] if isinstance(value, tuple | list) and value else value
    return "text" if isinstance(first, str | bytes) else type(value).__name__


def _add(digest: Any, value: Tensor) -> None:
    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
