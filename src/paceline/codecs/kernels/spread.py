"""Runs a kernel over ranges of a tensor on as many threads as torch would use.

Kernels are compiled by numba without the interpreter's lock, so plain threads run side by side. Where numba is missing
(`pip install 'paceline[codecs]'` brings it) codecs take their torch path, which gives the same bytes and more time.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_SMALL = 1 << 16  # elements: below this a second thread costs more than it saves


@functools.cache
def compiled() -> bool:
    """Whether fused kernels can run here."""
    return importlib.util.find_spec("numba") is not None and os.environ.get("PACELINE_KERNELS") != "torch"


@functools.cache
def _pool(threads: int, pid: int) -> ThreadPoolExecutor:  # a forked process needs threads of its own
    return ThreadPoolExecutor(threads, thread_name_prefix="codec-kernel")


def spread(kernel: Callable[..., Any], num: int, *args: Any, unit: int = 1) -> list[Any]:
    """`kernel(start, stop, *args)` over ranges that cover `num` and begin at multiples of `unit`; what they return.

    >>> spread(lambda start, stop, text: text[start:stop], 4, "abcd")
    ['abcd']
    """
    threads = torch.get_num_threads()
    if threads == 1 or num <= _SMALL:
        return [kernel(0, num, *args)]
    per = -(-num // (threads * unit)) * unit
    ranges = [(start, min(start + per, num)) for start in range(0, num, per)]
    pool = _pool(threads, os.getpid())
    others = [pool.submit(kernel, start, stop, *args) for start, stop in ranges[1:]]
    first = kernel(*ranges[0], *args)
    return [first, *(future.result() for future in others)]
