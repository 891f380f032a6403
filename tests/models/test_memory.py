"""Freed memory is kept, in a process that asked for it and in no other."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from turnstile.models.memory import zeros

PAGES = 2**26 // 4096  # of the tensor that is made again and again

COUNTS = """
import resource, sys
import torch
from turnstile.models.memory import keep_freed_memory
assert sys.argv[1] == "as it is" or keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
taken = []
for again in range(8):
    before = faults()
    torch.ones(2**24).add_(1)
    taken.append(faults() - before)
print(min(taken))  # the first rounds still settle where the heap ends
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="it takes glibc")
def test_memory_is_not_taken_anew() -> None:
    taken = {
        how: int(subprocess.run([sys.executable, "-c", COUNTS, how], check=True, capture_output=True).stdout)
        for how in ("as it is", "kept")
    }
    assert taken["kept"] < PAGES / 100
    assert taken["as it is"] > taken["kept"]


@pytest.mark.parametrize("shape", [(0, 3), (5,), (3, 7, 1000)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = zeros(shape, dtype, torch.device("cpu"))
    assert (found.shape, found.dtype) == (shape, dtype)
    assert not found.any()
    assert found.numel() == 0 or found.data_ptr() % 64 == 0
    found += 1
    assert bool((found == 1).all())


RESIDENT = """
import resource, sys
import torch
from turnstile.models.memory import zeros
room = zeros((2**12, 2**16), torch.uint8, torch.device("cpu"))
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
before = resident()
room[:, : 2**12] = 1
print(resident() - before, room.nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_only_what_is_written_takes_memory() -> None:
    """Also where the system has pages of 2 MB for who asks."""
    found = subprocess.run([sys.executable, "-c", RESIDENT], check=True, capture_output=True).stdout
    taken, whole = map(int, found.split())
    assert whole / 17 < taken < whole / 8
