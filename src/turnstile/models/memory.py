"""Memory that is kept when it was used once, and memory that is taken when it is used first.

glibc gives a large block back to the system when it is freed, and takes it anew, page by page and filled with zeros,
when the next tensor of that size is made. On a CPU that was a fifth of a training step, where it was profiled.
"""

from __future__ import annotations

import ctypes
from math import prod

import numpy as np
import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as malloc.h has them
_LARGEST = 2**30  # bytes of a block that is kept
_LINE = 64  # bytes that tensors begin at a multiple of


def keep_freed_memory() -> bool:
    """From now on this process keeps what it frees, for itself; its peak changes little, as every step needs the same
    again. Returns whether that could be had: it takes glibc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.zeros`, which writes them all. On a CPU fresh memory is left to the system, which gives it page by
    page, and zero, to who writes there first; what the process had before is written all the same."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    room = np.zeros(size + _LINE, np.uint8)
    begin = -room.ctypes.data % _LINE
    return torch.from_numpy(room[begin : begin + size]).view(dtype).view(shape)
