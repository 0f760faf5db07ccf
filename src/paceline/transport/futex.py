"""Waiting for a 32-bit word in shared memory to change, without a compiler and without polling.

A writer stores the word and calls `wake`; a reader that has spun in vain calls `wait`. The kernel's futex gives both.
On machines that are not Linux on x86-64 or arm64 the wait is a short sleep.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import time

_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98}
_NUMBER = _NUMBERS.get(platform.machine(), 0) if sys.platform == "linux" else 0
_WAIT, _WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)


def wait(address: int, seen: int, limit_s: float) -> None:
    """Return when the word at `address` may differ from `seen`, or after `limit_s`."""
    if not _NUMBER:
        time.sleep(min(limit_s, 50e-6))
        return
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    if _syscall(_NUMBER, address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, f"futex wait: {errno.errorcode.get(code, code)}")


def wake(address: int) -> None:
    """Wake everyone who waits for the word at `address`."""
    if _NUMBER:
        _syscall(_NUMBER, address, _WAKE, 0x7FFFFFFF, None, None, 0)


_word = ctypes.c_uint32()

if platform.machine() in ("x86_64", "AMD64"):

    def fence() -> None:
        """Stores before it are seen before stores after it; x86 promises that by itself."""

else:

    def fence() -> None:
        """Stores before it are seen before stores after it: the kernel's futex path holds a full barrier."""
        wake(ctypes.addressof(_word))
