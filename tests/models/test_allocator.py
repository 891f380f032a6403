"""Freed memory is kept, only in a process that asked for it; unwritten memory takes no pages."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from turnstile.models.allocator import zeros

PAGES = 2**26 // 4096  # of the tensor that is made again and again

COUNTS = """
import resource, sys
import torch
from turnstile.models.allocator import keep_freed_memory
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
def test_freed_memory_is_reused() -> None:
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


def test_too_large_a_tensor_raises() -> None:
    with pytest.raises(MemoryError, match="not enough memory for a tensor of 134217728 MB: Cannot allocate memory"):
        zeros((2**47,), torch.uint8, torch.device("cpu"))


RESIDENT = """
import os, re, resource, sys
import torch
from turnstile.models.allocator import zeros
torch.set_num_threads(1)
page = resource.getpagesize()
rows = 2**12
room = zeros((rows, 16 * page), torch.uint8, torch.device("cpu"))
def resident():
    with open("/proc/self/smaps_rollup") as file:
        return int(re.search(r"Rss: +([0-9]+) kB", file.read())[1]) * 1024
taken = [resident()]
room[:, :page] = 1
taken.append(resident())
if os.fork() == 0:
    room[:, :page] = 2
    os._exit(0)
os.wait()
assert int(room[:, :page].max()) == 1, "a fork wrote here"
del room
taken.append(resident())
print(*[(after - taken[0]) / (rows * page) for after in taken[1:]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_only_written_pages_take_memory() -> None:
    """Also where the system offers pages of 2 MB; and none once the tensor is freed."""
    found = subprocess.run([sys.executable, "-c", RESIDENT], check=True, capture_output=True).stdout
    written, left = map(float, found.split())
    assert 0.9 < written < 2
    assert left < 0.7


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no large pages")
def test_uses_small_pages() -> None:
    room = zeros((2**24,), torch.uint8, torch.device("cpu"))
    with open("/proc/self/smaps") as file:
        parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", file.read(), flags=re.MULTILINE)
    own = next(part for part in parts[1:] if _holds(part, room.data_ptr()))
    flags = re.search(r"^VmFlags: (.*)$", own, flags=re.MULTILINE)
    assert flags is not None
    assert "nh" in flags[1].split()


def _holds(part: str, address: int) -> bool:
    begin, end = (int(each, 16) for each in part.split()[0].split("-"))
    return begin <= address < end
