"""The random states of this process: Python's, numpy's, torch's on the CPU and on every CUDA device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """What `set_random_states` needs to continue every stream of random numbers where it is now."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # asking earlier would take memory on a device that nobody uses
        states["cuda"] = torch.cuda.get_rng_state_all()
        states["cuda_current"] = torch.cuda.current_device()
    return states


def seed_newcomer(seed: int, step: int, rank: int) -> None:
    """Begin torch's stream of a member that has none to continue: one of its own, the same whenever it comes here."""
    torch.manual_seed(seed * 1_000_003 + step * 1009 + rank)


def set_random_states(states: dict[str, Any]) -> None:
    """Continue the streams in `states`; a device that this process does not have is left out.

    The device in use then takes over the stream of the one that was in use when the state was taken: after a
    resume on other hosts the member may sit on another device.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" not in states or not torch.cuda.is_available():
        return
    streams = dict(enumerate(states["cuda"]))
    streams[torch.cuda.current_device()] = streams[states["cuda_current"]]
    for index, stream in streams.items():
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(stream, index)
