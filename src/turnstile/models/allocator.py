"""Keep freed memory on CPUs, and commit zeroed memory only when it is first written.

glibc returns a large block to the system when it is freed, and requests it again, page by page and filled with zeros,
for the next tensor of that size. This took a fifth of the time when a training step on a CPU was profiled.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h
_MAX_KEPT_BYTES = 2**30  # largest block that is kept, in bytes


def keep_freed_memory() -> bool:
    """Make this process keep freed memory for itself; return whether that worked, which requires glibc.

    Peak memory changes little, as every step needs the same blocks again.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _MAX_KEPT_BYTES)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros as `torch.zeros` does, but without writing them on a CPU.

    The system provides zeroed pages on first write. Huge pages are turned off, since one would be committed whole for a
    few bytes. Raises MemoryError if a CPU does not have enough memory.
    """
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)  # private, or forks would share it
    except OSError as error:
        raise MemoryError(f"not enough memory for a tensor of {size / 2**20:.0f} MB: {error.strerror}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux only
        with suppress(OSError):  # a kernel without huge pages
            room.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(room, dtype=dtype).view(shape)
