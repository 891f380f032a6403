"""Products with a packed matrix, against the same arithmetic in float64."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from turnstile.engines.local.cpu import thread_pool as teams
from turnstile.engines.local.cpu.packed_matrix import PackedMatrix

with_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


def wanted(x: Tensor, matrix: Tensor, bias: Tensor, floor: float | None, gated: bool) -> Tensor:
    x = x.double()
    if floor is not None:
        x = x / (x.square().sum(-1, keepdim=True) + floor**2).sqrt()
    out = x @ matrix.double().T + bias.double()
    first, second = out.chunk(2, dim=-1) if gated else (out, out)
    return silu(first) * second if gated else out


@with_numba
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("floor", [None, 0.3])
@pytest.mark.parametrize(("width", "depth"), [(960, 576), (192, 1536), (100, 77), (2, 1)])
def test_products_match_float64(width: int, depth: int, floor: float | None, gated: bool, threads: int) -> None:
    torch.manual_seed(0)
    matrix, bias, scale = torch.randn(width, depth), torch.randn(width), torch.rand(depth)
    order = torch.randperm(width)
    packed = PackedMatrix([matrix[: width // 3], matrix[width // 3 :]], bias, scale=scale, order=order, gated=gated)
    for rows in (1, 3, 4, 5, 32, 64, 65, 150):
        x = torch.randn(rows, depth)
        x[0] = 0
        should = wanted(x, (matrix * scale)[order], bias, floor, gated)
        within = 1e-6 * depth**0.5 * float(should.abs().max())
        found = packed(x, floor=floor)
        assert float((found.double() - should).abs().max()) <= within
        added = torch.randn(found.shape)
        assert float((packed(x, added, floor).double() - added - should).abs().max()) <= within


@with_numba
def test_row_is_independent_of_others_and_threads() -> None:
    """To the last bit."""
    torch.manual_seed(1)
    panels = PackedMatrix([torch.randn(300, 400)], gated=True)
    x, added = torch.randn(140, 400), torch.randn(140, 150)
    whole = panels(x, added, 0.1)
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert panels(x, added, 0.1).equal(whole)
            for begin, end in ((0, 1), (5, 7), (60, 67), (100, 140)):
                assert panels(x[begin:end], added[begin:end], 0.1).equal(whole[begin:end])
    finally:
        torch.set_num_threads(before)
        teams.release_torch_threads()


@with_numba
def test_strided_inputs() -> None:
    """More dimensions, and numbers or rows that are not contiguous."""
    torch.manual_seed(2)
    matrix, scale, bias = torch.randn(20, 30), torch.rand(20, 2)[:, 0], torch.randn(30, 3)[:, 1]
    x, added = torch.randn(3, 2, 20).transpose(0, 1), torch.randn(3, 2, 30).transpose(0, 1)
    should = x @ (scale[:, None] * matrix) + bias + added
    assert not any(each.is_contiguous() for each in (scale, bias, x, added))
    for each in (matrix.T, torch.cat([matrix.T, torch.ones(30, 4)], dim=1)[:, :20]):
        found = PackedMatrix([each], bias, scale=scale)(x, added)
        torch.testing.assert_close(found, should, rtol=1e-5, atol=1e-5)


@with_numba
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rejects_other_dtypes_and_devices(dtype: torch.dtype) -> None:
    """Loading a model changes torch's defaults for a while, for all threads."""
    matrix, x = torch.randn(50, 20), torch.randn(3, 20)
    should = PackedMatrix([matrix])(x)
    torch.set_default_dtype(dtype)
    try:
        assert PackedMatrix([matrix])(x).equal(should)
    finally:
        torch.set_default_dtype(torch.float32)


@with_numba
def test_empty_input() -> None:
    assert PackedMatrix([torch.randn(20, 30)])(torch.zeros(0, 30)).shape == (0, 20)
    x = torch.randn(5, 30)
    row = torch.randn(1, 30)
    torch.testing.assert_close(PackedMatrix([row])(x), x @ row.T, rtol=1e-5, atol=1e-5)


@with_numba
@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_nan_survives(what: float) -> None:
    """Only in its row, also if the matrix has padding columns."""
    x = torch.randn(6, 50)
    x[2, 7] = what
    found = PackedMatrix([torch.randn(31, 50)])(x)
    assert found.isfinite().all(-1).tolist() == [True, True, False, True, True, True]
    assert not PackedMatrix([torch.randn(30, 50)], gated=True)(x, floor=0.1)[2].isfinite().any()


@with_numba
def test_rejects_wrong_shapes() -> None:
    """Otherwise the kernel would read and write out of bounds."""
    panels = PackedMatrix([torch.zeros(6, 8)])
    for x, added, said in (
        (torch.zeros(3, 7), None, "the input: torch.float32 (3, 7)"),
        (torch.zeros(3, 8).double(), None, "the input: torch.float64"),
        (torch.zeros(3, 8), torch.zeros(3, 5), "the added tensor: torch.float32 (3, 5)"),
        (torch.zeros(3, 8), torch.zeros(6), "need torch.float32 (3, 6)"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            panels(x, added)
    with pytest.raises(ValueError, match="a matrix: "):
        PackedMatrix([torch.zeros(6, 8), torch.zeros(6, 7)])
    with pytest.raises(ValueError, match="biases: "):
        PackedMatrix([torch.zeros(6, 8)], torch.zeros(5))
    with pytest.raises(ValueError, match="scales: "):
        PackedMatrix([torch.zeros(6, 8)], scale=torch.zeros(6))
    with pytest.raises(ValueError, match="7 outputs cannot be split"):
        PackedMatrix([torch.zeros(7, 8)], gated=True)


@with_numba
@pytest.mark.parametrize("cpu_features", [["avx512f", "avx"], ["avx"], []])
@pytest.mark.slow
def test_tile_sizes_of_every_processor(cpu_features: list[str], tmp_path: Path) -> None:
    """The results are equal, since sums are accumulated in one order."""
    script = f"""
import torch
from llvmlite import binding
from numba.core.registry import cpu_target
cpu_target.target_context  # which compiles for this one
binding.get_host_cpu_features = lambda: dict.fromkeys({cpu_features}, True)
from turnstile.engines.local.cpu.packed_matrix import PackedMatrix
torch.manual_seed(3)
x = torch.randn(21, 90)
torch.save(PackedMatrix([torch.randn(130, 90)])(x), "found.pt")
"""
    environment = {**os.environ, "TURNSTILE_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True, timeout=300)
    torch.manual_seed(3)
    x = torch.randn(21, 90)
    assert torch.load(tmp_path / "found.pt").equal(PackedMatrix([torch.randn(130, 90)])(x))


@with_numba
def test_raises_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnstile.engines.local.cpu.compiled.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="kernels are not available here"):
        PackedMatrix([torch.zeros(3, 4)])
