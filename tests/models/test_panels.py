"""Products with a matrix in panels, beside the same arithmetic in float64."""

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

from turnstile.models import teams
from turnstile.models.compiled import available
from turnstile.models.panels import Panels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    assert available()


def wanted(x: Tensor, matrix: Tensor, bias: Tensor, floor: float | None, gated: bool) -> Tensor:
    x = x.double()
    if floor is not None:
        x = x / (x.square().sum(-1, keepdim=True) + floor**2).sqrt()
    out = x @ matrix.double().T + bias.double()
    first, second = out.chunk(2, dim=-1) if gated else (out, out)
    return silu(first) * second if gated else out


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("floor", [None, 0.3])
@pytest.mark.parametrize(("width", "depth"), [(960, 576), (192, 1536), (100, 77), (2, 1)])
def test_products_are_those_of_float64(width: int, depth: int, floor: float | None, gated: bool, threads: int) -> None:
    torch.manual_seed(0)
    matrix, bias, scale = torch.randn(width, depth), torch.randn(width), torch.rand(depth)
    order = torch.randperm(width)
    panels = Panels([matrix[: width // 3], matrix[width // 3 :]], bias, scale=scale, order=order, gated=gated)
    for rows in (1, 3, 4, 5, 32, 64, 65, 150):
        x = torch.randn(rows, depth)
        x[0] = 0
        should = wanted(x, (matrix * scale)[order], bias, floor, gated)
        within = 1e-6 * depth * float(should.abs().max())
        found = panels(x, floor=floor)
        assert float((found.double() - should).abs().max()) <= within
        added = torch.randn(found.shape)
        assert float((panels(x, added, floor).double() - added - should).abs().max()) <= within


def test_a_row_depends_neither_on_others_nor_on_threads() -> None:
    """To the last bit."""
    torch.manual_seed(1)
    panels = Panels([torch.randn(300, 400)], gated=True)
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
        teams.leave_team()


def test_whatever_lies_otherwise_is_taken_as_it_is() -> None:
    """More dimensions, and numbers that do not lie side by side."""
    torch.manual_seed(2)
    matrix, x, added = torch.randn(20, 30), torch.randn(2, 3, 20), torch.randn(2, 3, 30)
    found = Panels([matrix.T], scale=torch.ones(20, 2)[:, 0])(
        x.transpose(0, 1).contiguous().transpose(0, 1), added.flip(0).flip(0)[...]
    )
    torch.testing.assert_close(found, x @ matrix + added, rtol=1e-5, atol=1e-5)
    assert Panels([matrix])(torch.zeros(0, 30)).shape == (0, 20)


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_numbers_that_are_lost_stay_lost(what: float) -> None:
    """In their row alone, also where the matrix has columns beyond its last."""
    x = torch.randn(6, 50)
    x[2, 7] = what
    found = Panels([torch.randn(31, 50)])(x)
    assert found.isfinite().all(-1).tolist() == [True, True, False, True, True, True]
    assert not Panels([torch.randn(30, 50)], gated=True)(x, floor=0.1)[2].isfinite().any()


def test_what_does_not_fit_is_refused() -> None:
    """The kernel would read and write beside it."""
    panels = Panels([torch.zeros(6, 8)])
    for x, added, said in (
        (torch.zeros(3, 7), None, "what comes in: torch.float32 (3, 7)"),
        (torch.zeros(3, 8).double(), None, "what comes in: torch.float64"),
        (torch.zeros(3, 8), torch.zeros(3, 5), "what is added: torch.float32 (3, 5)"),
        (torch.zeros(3, 8), torch.zeros(6), "want torch.float32 (3, 6)"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            panels(x, added)
    with pytest.raises(ValueError, match="a matrix: "):
        Panels([torch.zeros(6, 8), torch.zeros(6, 7)])
    with pytest.raises(ValueError, match="biases: "):
        Panels([torch.zeros(6, 8)], torch.zeros(5))
    with pytest.raises(ValueError, match="scales: "):
        Panels([torch.zeros(6, 8)], scale=torch.zeros(6))
    with pytest.raises(ValueError, match="7 numbers come out, half of which"):
        Panels([torch.zeros(7, 8)], gated=True)


@pytest.mark.parametrize("features", [["avx512f", "avx"], ["avx"], []])
def test_tiles_of_every_processor(features: list[str], tmp_path: Path) -> None:
    """Their numbers are the same, as sums are added up in one order."""
    script = f"""
import torch
from llvmlite import binding
from numba.core.registry import cpu_target
cpu_target.target_context  # which compiles for this one
binding.get_host_cpu_features = lambda: dict.fromkeys({features}, True)
from turnstile.models.compiled import available
from turnstile.models.panels import Panels
assert available()
torch.manual_seed(3)
x = torch.randn(21, 90)
torch.save(Panels([torch.randn(130, 90)])(x), "found.pt")
"""
    environment = {**os.environ, "TURNSTILE_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True, timeout=300)
    torch.manual_seed(3)
    x = torch.randn(21, 90)
    assert torch.load(tmp_path / "found.pt").equal(Panels([torch.randn(130, 90)])(x))
