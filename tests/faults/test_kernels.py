"""Compiled kernels and the folder they are kept in, in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")

SCRIPT = """
import torch
from turnstile.engines.local.cpu import compiled

kv = torch.ones(1, 2, 1, 1, 3, 4)
print(compiled.KernelAttention([[(kv, 0, 3)]]).attend(0, torch.ones(1, 2, 1, 4), 1.0).tolist())
"""


def attended(cache: Path) -> str:
    """What a process of its own says on its standard error, while it gives what it should."""
    environment = {**os.environ, "TURNSTILE_CACHE": str(cache)}
    found = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True)
    assert found.stdout == "[[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]]\n"
    return found.stderr


def kept(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.nbc")}


def test_they_are_compiled_once_for_all_processes_and_anew_after_a_crash(tmp_path: Path) -> None:
    assert attended(tmp_path) == ""
    first = kept(tmp_path)
    assert any("attend_2_4" in path.name for path in first)
    assert attended(tmp_path) == ""
    assert kept(tmp_path) == first
    for index in tmp_path.rglob("*.nbi"):
        index.write_bytes(b"")  # made, and never written
    warning = attended(tmp_path)
    assert "recompiling the kernels in " in warning
    assert ": EOFError" in warning
    assert attended(tmp_path) == ""


def test_several_processes_may_begin_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "TURNSTILE_CACHE": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", SCRIPT.replace("4", str(width))], env=environment, text=True)
        for width in (4, 7, 4)
    ]
    assert [process.wait(300) for process in running] == [0, 0, 0]
    before = kept(tmp_path)
    assert {"attend_2_4", "attend_2_7"} <= {path.name.split(".")[1].partition("-")[0] for path in before}
    assert attended(tmp_path) == ""
    assert kept(tmp_path) == before


def test_without_a_place_to_keep_them_they_are_compiled_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "kernels are compiled again in every process: " in attended(tmp_path / "file")


COMPUTE = """
import hashlib, sys, torch
from turnstile.engines.local.cpu import compiled
from turnstile.engines.local.cpu.packed_matrix import PackedMatrix

torch.manual_seed(0)
found = hashlib.sha256()
for heads, width in ((2, 8), (3, 64)):
    kept = torch.randn(1, 2, 1, 1, 300, width)
    seen = compiled.KernelAttention([[(kept, 0, 300)]] * 2).attend(0, torch.randn(1, heads, 2, width), width**-0.5)
    found.update(seen.numpy().tobytes())
product = PackedMatrix([torch.randn(192, 64)], scale=torch.rand(64), gated=True)
found.update(product(torch.randn(7, 64), floor=1e-5).numpy().tobytes())
found.update(str(compiled.draw(torch.randn(4, 1000), range(4), [0.1, 0.4, 0.6, 0.9], 0.7)).encode())
print(found.hexdigest())
"""


def test_compiled_now_or_kept_they_compute_the_same_bits(tmp_path: Path) -> None:
    """What is compiled in a process must not call, where it calls helpers, others than what is loaded does."""
    environment = {**os.environ, "TURNSTILE_CACHE": str(tmp_path)}
    found = [
        subprocess.run([sys.executable, "-c", COMPUTE], env=environment, check=True, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert found[0].stdout == found[1].stdout
