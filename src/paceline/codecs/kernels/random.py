"""Random numbers made of a seed, a step and an element's index alone: no state, so any thread may draw any of them.

    keys      (seed, step) → two words that name a stream
    draws     the numbers of the first elements of a stream, in torch
    draw      one of them, for kernels: fuse.py has numba compile it into those that call it

Both forms give the same multiples of 2**-24 in [0, 1). A number is a keyed integer hash of its index: the index meets
one key, is multiplied and folded, meets the other key, and is multiplied and folded again. (With a single key, streams
of two seeds would be one stream, shifted.) It is meant for rounding, not for secrets. Streams repeat after 2**32
elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_WORD = 0xFFFFFFFF
_FIRST = 0x7FEB352D  # odd multipliers and shifts that leave little bias in any bit
_SECOND = 0x846CA68B


def keys(seed: int, step: int = 0) -> tuple[int, int]:
    """Two 32-bit words that name the stream of a seed at a step.

    >>> keys(1, 2) == keys(1, 2), keys(1, 2) == keys(2, 1)
    (True, False)
    """
    word = _spread_bits(_spread_bits(seed) + step)
    return word & _WORD, word >> 32


def _spread_bits(word: int) -> int:
    """The finaliser of SplitMix64: each bit of the word reaches all others."""
    word = (word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)


def draws(stream: tuple[int, int], numel: int, device: torch.device | None = None) -> torch.Tensor:
    """The numbers of the elements 0 to `numel` - 1, float32 in [0, 1)."""
    word = torch.arange(numel, dtype=torch.int64, device=device).bitwise_and_(_WORD).bitwise_xor_(stream[0])
    word ^= word >> 16
    word.mul_(_FIRST).bitwise_and_(_WORD).bitwise_xor_(stream[1])  # the product wraps; its low word is right
    word ^= word >> 15
    word.mul_(_SECOND).bitwise_and_(_WORD)
    word ^= word >> 16
    return (word >> 8).to(torch.float32).mul_(2.0**-24)


def draw(index: Any, first: Any, second: Any) -> Any:
    """The number of one element; `first` and `second` are the stream's keys as uint32."""
    word = np.uint32(np.uint32(index) ^ first)
    word = np.uint32(word ^ (word >> np.uint32(16)))
    word = np.uint32(np.uint32(word * np.uint32(_FIRST)) ^ second)
    word = np.uint32(word ^ (word >> np.uint32(15)))
    word = np.uint32(word * np.uint32(_SECOND))
    word = np.uint32(word ^ (word >> np.uint32(16)))
    return np.float32(np.int32(word >> np.uint32(8))) * np.float32(2.0**-24)
