"""A member's segment: others read it and cannot change it, and its owner can give its pages back."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from paceline.transport import pages
from paceline.transport.segment import Segment

NBYTES = 1 << 20


@pytest.fixture
def made() -> Iterator[tuple[Segment, int]]:
    segment, descriptor = Segment.create(NBYTES)
    yield segment, descriptor
    os.close(descriptor)


def taken(descriptor: int) -> int:
    """Bytes that it takes in memory."""
    return os.fstat(descriptor).st_blocks * 512


def test_whoever_reads_a_segment_cannot_change_it(made: tuple[Segment, int]) -> None:
    segment, descriptor = made
    segment.data.fill_(7)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, NBYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"0")
    with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
        os.ftruncate(descriptor, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    reader = Segment(os.dup(descriptor), NBYTES, own=False)
    pages.give_back(reader.data)
    assert taken(descriptor) >= NBYTES
    assert bool((segment.data == 7).all())


def test_what_its_owner_gives_back_is_taken_again_when_written(made: tuple[Segment, int]) -> None:
    segment, descriptor = made
    reader = Segment(os.dup(descriptor), NBYTES, own=False)
    segment.raise_to(0, 5)
    segment.data.fill_(7)
    assert int(reader.data.sum()) == 7 * NBYTES
    pages.give_back(segment.data[10 : NBYTES // 2])
    assert taken(descriptor) <= NBYTES // 2 + 3 * mmap.PAGESIZE
    assert bool((reader.data[NBYTES // 2 :] == 7).all())
    assert bool((reader.data[:10] == 7).all())
    assert int(reader.data[mmap.PAGESIZE : NBYTES // 4].sum()) == 0
    pages.give_back(segment.data)
    assert taken(descriptor) <= NBYTES // 4 + 2 * mmap.PAGESIZE  # that was read just now
    assert reader.counter(0) == 5
    segment.data.fill_(9)
    assert int(reader.data.sum()) == 9 * NBYTES


def test_private_memory_is_given_back_too() -> None:
    flat = torch.ones(NBYTES, dtype=torch.uint8)
    pages.give_back(flat[100:200])  # no whole page
    assert int(flat.sum()) == NBYTES
    pages.give_back(flat[10:-10])
    assert int(flat.sum()) <= 2 * mmap.PAGESIZE
    assert bool((flat[:10] == 1).all())
    assert bool((flat[-10:] == 1).all())
