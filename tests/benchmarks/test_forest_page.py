"""What is written of training on shared prefixes is what was measured, and the work is counted as by hand."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from networks import network

ROOT = Path(__file__).parents[2]


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark as a module; the tests that mirror it have names like theirs."""
    spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = benchmark("forest", monkeypatch)
    assert module.page() == (ROOT / "docs" / "results" / "performance.md").read_text(encoding="utf-8")


def test_work_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 3 + 2 tokens: 7 tokens in the tree and 10 in rows, 4 of them trained."""
    module, model = benchmark("forest", monkeypatch), network(num_hidden_layers=1)
    rows = module.group_of(2, 3, 2, 40)
    matrices = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    head, width = 4 * 32 * 40, 32
    pairs = (1 + 2 + 3) + 2 * (4 + 5)
    assert module.flops(model, rows, share=True) == 3 * (2 * matrices * 7 + 2 * head + 4 * width * pairs)
    assert module.flops(model, rows, share=False) == 3 * (2 * matrices * 10 + 2 * head + 4 * width * (pairs + 6))


def test_a_plain_loop_takes_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("forest", monkeypatch)
    rows = module.group_of(3, 5, 4, 40)
    losses = []
    for contestant in module.CONTESTANTS:
        model = network()
        model.set_attn_implementation("sdpa")
        before = float(module.plain_loss(model, rows, module.token_weights(rows)).detach())
        module.updating(model, contestant, 20)(rows)
        model.set_attn_implementation("sdpa")
        losses.append((before, float(module.plain_loss(model, rows, module.token_weights(rows)).detach())))
    for before, after in losses:
        assert after < before
        assert (before, after) == pytest.approx(losses[0], rel=1e-5)


def test_what_an_update_allocates_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows with the tokens, and a plain loop takes no less than the learner."""
    module = benchmark("forest", monkeypatch)
    short, long = (module.Point(model=module.SMALL, group=2, prompt=prompt, budget=2000) for prompt in (100, 500))
    found = {
        (contestant, point.prompt): module.allocated(point, contestant, 0)["allocated_mb"]
        for contestant, point in itertools.product(("shared", "unshared", "batches"), (short, long))
    }
    assert 1.8 < found["unshared", 500] / found["unshared", 100] < 2.4  # 1,400 tokens and 600
    assert found["shared", 500] < 0.75 * found["unshared", 500]  # 900 tokens
    assert found["unshared", 500] < 1.02 * found["batches", 500]


def test_the_one_for_accelerators_runs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--tiny", "--repeats", "1"])
    benchmark("gpu", monkeypatch).main()
    report = json.loads(capsys.readouterr().out)
    assert report["tiny"]["training"]["ratio of FLOPs"] > 1.5
    assert report["tiny"]["decoding"]["engine"] > 0
