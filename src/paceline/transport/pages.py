"""Give the memory under a tensor back to the system while the tensor stays: it then reads as zeros.

Memory that is shared by a file (`segment`) is taken out of the file, and so out of every process that has it mapped;
the kernel allows that as long as the file is not sealed against writing. Private memory is dropped where it lies. Pages
that the tensor fills only in part stay. Whatever is written later gets new pages.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

_madvise = ctypes.CDLL(None).madvise
_madvise.restype = ctypes.c_int
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def give_back(flat: torch.Tensor) -> None:
    """The contents of `flat`, contiguous and in host memory, are not needed any more.

    >>> flat = torch.ones(100_000)
    >>> give_back(flat)
    >>> int(flat.count_nonzero()) < 2048  # what is left lies in pages that it shares with others
    True
    """
    begin = -(-flat.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (flat.data_ptr() + flat.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes > 0 and _madvise(begin, nbytes, mmap.MADV_REMOVE):  # refused: it is private
        _madvise(begin, nbytes, mmap.MADV_DONTNEED)  # a system that has neither keeps them, which is no harm
