from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("benchmark_of_tasks", ROOT / "benchmarks" / "tasks.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)  # where its dataclasses look for it
    spec.loader.exec_module(benchmark)
    text = (ROOT / "docs" / "results" / "tasks.md").read_text(encoding="utf-8")
    assert benchmark.page() == text
    assert benchmark.table("T", ("a", "b"), [[1, "x"]]) == "## T\n\n| a | b |\n|---|---|\n| 1 | x |"
    assert (benchmark.share(1, 3), benchmark.share(0, 0), benchmark.mean([]), benchmark.mean([1, 0])) == (
        "33%", "-", "-", "0.50",
    )  # fmt: skip
