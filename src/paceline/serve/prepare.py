"""From settings to an engine that is warm: make the model, load a version, choose how to compute, run every size.

Runs in a thread of the replica while its loop already answers. The model is the user's: FUNCTION() makes it, and
example_inputs() beside it, or --input, says what one item looks like.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

from paceline.core import loading
from paceline.core.errors import ConfigError
from paceline.serve import forms
from paceline.serve.bodies import wanted
from paceline.serve.choice import choose
from paceline.serve.engine import Engine
from paceline.serve.fields import Field, inputs_of, zeros
from paceline.serve.settings import Settings
from paceline.serve.shelf import Shelf
from paceline.serve.swap import Swap

_LOOK_S = 0.02
_BESIDE_S = 0.005  # batches that take longer leave the loop to a thread of their own; on a GPU all do


class Prepared(NamedTuple):
    """What the replica starts with."""

    engine: Engine
    beside: bool
    said: str
    use_threads: Callable[[], None]


def prepare(settings: Settings, shelf: Path) -> Prepared:
    """ConfigError says what of the model or its inputs does not fit."""
    model, module, where = make_model(settings.model)
    inputs = inputs_of(model, module, settings.inputs, where)
    device = _device(settings.device)
    forward = forms.set_precision(model.to(device), settings.precision)
    share = int(os.environ.get("OMP_NUM_THREADS", "1"))
    _try(forward, inputs, device)
    choice = choose(settings, share, forward, model, inputs, shelf.parent)
    swap = Swap(model, Shelf(shelf), cast=settings.precision != "fp32")
    _await_first(swap)
    most = settings.max_batch_size
    chosen = forms.formed(choice.form, forward, model, inputs, most)
    engine = Engine(chosen, inputs, swap, most, device=device, sizes=forms.sizes(choice.form, most))
    beside = engine.warm() > _BESIDE_S or device.type != "cpu"  # while a GPU computes, the loop reads requests
    return Prepared(engine, beside, choice.said, lambda: torch.set_num_threads(choice.threads))


def make_model(text: str) -> tuple[nn.Module, ModuleType, str]:
    """What FILE:FUNCTION makes, in evaluation mode; the module in which the function is, and how it was named."""
    module, where, name = loading.named(text)
    if not name:
        raise ConfigError(f"--model {text!r}: name the function that makes the model, as in train.py:make_model")
    model = loading.result(module, name, where)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{text} returned a {type(model).__name__}, not an nn.Module")
    return model.eval(), module, where


def _device(name: str) -> torch.device:
    """Where to compute; ConfigError where there is no such thing here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name!r} cannot be used here: {reason}; leave it out for the CPU") from None
    return device


def _try(forward: forms.Forward, inputs: list[Field], device: torch.device) -> None:
    """Does the model take what it is said to take?"""
    try:
        with torch.inference_mode():
            forward(*zeros(inputs, 1, device))
    except Exception as error:
        raise ConfigError(
            f"the model does not take {wanted(inputs)}: {type(error).__name__}: {error}; give --input as it takes them"
        ) from error


def _await_first(swap: Swap) -> None:
    """As long as it takes: the parent says what it waits for, and with the parent this process ends too."""
    while not swap.install():
        time.sleep(_LOOK_S)
