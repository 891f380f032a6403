"""Memory that is kept when it was used once, and memory that is taken when it is used first.

glibc gives a large block back to the system when it is freed, and takes it anew, page by page and filled with zeros,
when the next tensor of that size is made. On a CPU that was a fifth of a training step, where it was profiled.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as malloc.h has them
_LARGEST = 2**30  # bytes of a block that is kept


def keep_freed_memory() -> bool:
    """From now on this process keeps what it frees, for itself; its peak changes little, as every step needs the same
    again. Returns whether that could be had: it takes glibc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.zeros`, which writes all of it. On a CPU it is fresh memory that the system gives page by page, and
    zero, to who writes there first: small pages, as a large one would be given whole for a few bytes. Raises
    MemoryError where there is none."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)  # else forks would share it
    except OSError as error:
        raise MemoryError(f"no room for a tensor of {size / 2**20:.0f} MB: {error.strerror}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # of Linux
        with suppress(OSError):  # a kernel without large pages
            room.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(room, dtype=dtype).view(shape)
