"""Compiles a kernel with numba, when it is first called, and keeps the machine code beside its file.

What is kept is known by the date of the kernel's own file. So a kernel calls no kernel of another file; the one
exception is `random.draw`, and after a change to it packing.py must be touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba import extending

from paceline.codecs.kernels.random import draw

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
_register: Any = extending.register_jitable
_register(draw)


def fuse(kernel: _Kernel) -> _Kernel:
    njit: Any = numba.njit
    options = {"nogil": True, "fastmath": False, "boundscheck": False, "error_model": "numpy"}
    try:
        fused: _Kernel = njit(cache=True, **options)(kernel)
    except RuntimeError:  # no folder can be written to keep what was compiled
        fused = njit(**options)(kernel)
    return fused
