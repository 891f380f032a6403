"""Freed memory is kept, in a process that asked for it and in no other."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

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
