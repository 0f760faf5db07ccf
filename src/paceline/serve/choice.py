"""Threads, layout and form by measurement: the first replica measures, the others take over what it found.

Measured on the model as it was made, before a version is in it: times do not depend on the values of weights. What is
timed is one item and a full batch; a choice is better if the mean of its two times, relative to those of the model as
it is, is lower by more than the noise.
"""

from __future__ import annotations

import fcntl
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import nn

from paceline.core.errors import ConfigError, TimedOut
from paceline.serve import forms
from paceline.serve.fields import Field, zeros
from paceline.serve.forms import Forward
from paceline.serve.settings import Settings

_BETTER = 0.97
_TRIAL_S = 0.15  # for each thing that is timed
_FEWEST = 5
_LIMIT_S = 900.0  # for the first replica, which may compile


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """How replicas compute."""

    threads: int
    layout: str = "as made"
    form: str = "eager"
    said: str = ""  # what was measured


def choose(
    settings: Settings, share: int, forward: Forward, model: nn.Module, inputs: Sequence[Field], directory: Path
) -> Choice:
    """What the first replica to come here has found; leaves the model laid out so."""
    file = directory / "choice.json"
    with (directory / "choice.lock").open("w") as lock:
        _lock(lock)
        try:
            choice = msgspec.json.decode(file.read_bytes(), type=Choice)
        except FileNotFoundError:
            choice = _measured(settings, share, forward, model, inputs)
            file.write_bytes(msgspec.json.encode(choice))
    torch.set_num_threads(choice.threads)
    if choice.layout != "as made":
        forms.lay_out(model, choice.layout)
    return choice


def _lock(file: IO[str]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"the first replica has not measured within {_LIMIT_S:g} s: try --compile eager"
                ) from None
            time.sleep(0.05)


def _measured(settings: Settings, share: int, forward: Forward, model: nn.Module, inputs: Sequence[Field]) -> Choice:
    most = settings.max_batch_size
    device = forms.device_of(model)
    said = []
    threads = settings.threads or 1
    torch.set_num_threads(threads)
    base = best = _times(forward, inputs, most, device)
    if not settings.threads and device.type == "cpu":
        for number in (1 << k for k in range(1, share.bit_length()) if 1 << k <= share):
            torch.set_num_threads(number)
            tried = _times(forward, inputs, most, device)
            if _relative(tried, best) < _BETTER:
                threads, best = number, tried
        if share > 1:
            said.append(f"{threads} of {share} threads")
        torch.set_num_threads(threads)
    layout = "as made"
    if any(parameter.dim() == 4 for parameter in model.parameters()):
        forms.lay_out(model, forms.CHANNELS_LAST)
        tried = _times(forward, inputs, most, device)
        said.append(f"channels last {_relative(tried, best):.2f}x")
        if _relative(tried, best) < _BETTER:
            layout, best = forms.CHANNELS_LAST, tried
        else:
            forms.lay_out(model, "as made")
    form = settings.compile if settings.compile != "auto" else "eager"
    if settings.compile == "auto":
        for other in ("export", "compile"):
            if other == "compile" and not (shutil.which("g++") or shutil.which("clang++")):
                said.append("compile left out: it needs a C++ compiler")
                continue
            try:
                tried = _times(forms.formed(other, forward, model, inputs, most), inputs, most, device)
            except ConfigError as error:
                said.append(f"{other} left out: {error}")
                continue
            said.append(f"{other} {_relative(tried, best):.2f}x")
            if _relative(tried, best) < _BETTER:
                form, best = other, tried
    said.append(f"{form}, 1 item in {best[0] * 1e3:.2f} ms, {most} in {best[1] * 1e3:.2f} ms")
    said += [f"before {base[0] * 1e3:.2f} and {base[1] * 1e3:.2f} ms"] * (best is not base)
    return Choice(threads=threads, layout=layout, form=form, said=", ".join(said))


def _times(forward: Forward, inputs: Sequence[Field], most: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one item and of a full batch: the lowest of several, which other processes disturb least."""
    found = []
    for items in (1, most):
        batch = zeros(inputs, items, device)
        with torch.inference_mode():
            forward(*batch)
            _finish(device)
            times: list[float] = []
            end = time.perf_counter() + _TRIAL_S
            while len(times) < _FEWEST or time.perf_counter() < end:
                began = time.perf_counter()
                forward(*batch)
                _finish(device)
                times.append(time.perf_counter() - began)
        found.append(min(times))
    return found[0], found[1]


def _finish(device: torch.device) -> None:
    """A GPU computes after the call has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _relative(tried: tuple[float, float], base: tuple[float, float]) -> float:
    return math.sqrt((tried[0] / base[0]) * (tried[1] / base[1]))
