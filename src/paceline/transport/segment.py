"""Shared memory between the members of one host: everyone reads everyone's segment and writes only its own.

A segment is a memfd, passed by descriptor over the links: it has no name, needs no /dev/shm, and is gone with the last
process that holds it, a killed one included. Others get a descriptor that is open for reading alone, which the kernel
maps no other way, so a member that was paused and comes back can harm nobody. The first page holds counters that only
the owner raises; `Lane.wait` waits until the others' counters have come far enough.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import warnings

import numpy as np
import torch

from paceline.core.errors import TimedOut
from paceline.core.status import Status
from paceline.transport import futex
from paceline.transport.local import Links

_HEAD = 4096
_NOTE = 64
_STRIDE = 16  # words: each counter has a cache line of its own

POSTED, REDUCED, PUBLISHED, DONE = range(4)


class Segment:
    """One member's memory as seen by one member."""

    def __init__(self, descriptor: int, nbytes: int, *, own: bool) -> None:
        size = _HEAD + nbytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if own else 0)
        self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=access)
        os.close(descriptor)
        memory = np.frombuffer(self._map, dtype=np.uint8)
        self._base = memory.ctypes.data
        self._words = memoryview(self._map)[:_HEAD].cast("I")
        self.note = memoryview(self._map)[_HEAD - _NOTE : _HEAD].cast("Q")  # the owner's, to read once it has posted
        with warnings.catch_warnings():  # the others' memory is not writable, on purpose
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self.data = torch.from_numpy(memory[_HEAD:])

    def counter(self, word: int) -> int:
        return self._words[word * _STRIDE]

    def address(self, word: int) -> int:
        return self._base + word * _STRIDE * 4

    def raise_to(self, word: int, value: int) -> None:
        futex.fence()
        self._words[word * _STRIDE] = value & 0xFFFFFFFF
        futex.wake(self.address(word))

    @staticmethod
    def create(nbytes: int) -> tuple[Segment, int]:
        """A new segment and a descriptor of it to give away, for reading; the caller closes the descriptor."""
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _HEAD + nbytes)  # zeros, taken from memory when first written
            # Not sealed against writing: its owner could not give pages back then (`pages`).
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(descriptor)
            raise
        try:
            return Segment(descriptor, nbytes, own=True), reading
        except BaseException:
            os.close(reading)
            raise


class Lane:
    """One segment per member of `ranks`, and the counters to work on them in step."""

    def __init__(
        self,
        links: Links,
        ranks: tuple[int, ...],
        name: str,
        nbytes: int,
        *,
        limit_s: float,
        status: Status,
    ) -> None:
        self.ranks = ranks
        self.index = ranks.index(links.rank)
        self.waited_s = 0.0
        self._links = links
        self._limit_s = limit_s
        self._status = status
        self._name = name
        self.own, descriptor = Segment.create(nbytes)
        try:
            others = [rank for rank in ranks if rank != links.rank]
            for rank in others:
                links.give(rank, name, descriptor)
            taken = {rank: Segment(links.take(rank, name, limit_s), nbytes, own=False) for rank in others}
        finally:
            os.close(descriptor)
        self.segments = [taken.get(rank, self.own) for rank in ranks]
        self.others = [(rank, taken[rank]) for rank in others]
        crowded = len(links.ranks) > len(os.sched_getaffinity(0))
        self._spins = 0 if crowded else 2000  # about 200 µs; a core that others need is not burnt

    def reached(self, word: int, value: int) -> bool:
        """Whether all others' counters have come to `value`."""
        for _, segment in self.others:
            if (segment.counter(word) - value) & 0x80000000:
                return False
        return True

    def wait(self, word: int, value: int, *, only: int | None = None) -> None:
        """Return when all others' counters (or only that of the member at index `only`) have come to `value`."""
        began = 0.0
        try:
            for rank, segment in self.others:
                if only is not None and rank != self.ranks[only]:
                    continue
                if not (segment.counter(word) - value) & 0x80000000:
                    continue
                began = began or time.monotonic()
                for _ in range(self._spins):
                    if not (segment.counter(word) - value) & 0x80000000:
                        break
                else:
                    self._block(rank, segment, word, value)
        finally:  # also where one is lost meanwhile: the others have waited for it
            if began:
                self.waited_s += time.monotonic() - began

    def _block(self, rank: int, segment: Segment, word: int, value: int) -> None:
        began = time.monotonic()
        before = self._status.what
        told = False
        try:
            while (segment.counter(word) - value) & 0x80000000:
                seen = segment.counter(word)
                if not (seen - value) & 0x80000000:
                    break
                futex.wait(segment.address(word), seen, 0.02)
                if not (segment.counter(word) - value) & 0x80000000:
                    break
                self._links.check(rank)
                waited = time.monotonic() - began
                if waited > self._limit_s:
                    late = TimedOut(
                        f"member {rank} did not arrive in {self._name} within {self._limit_s:g} s. Did its script "
                        "leave out a backward pass or a collective that others do? See `paceline status`; "
                        "--wait-limit-s sets the limit"
                    )
                    late.rank = rank
                    raise late
                if not told and waited > 0.01:
                    told = True
                    self._status.set(f"waiting for member {rank} ({self._name})")
        finally:
            if told:
                self._status.set(before)
