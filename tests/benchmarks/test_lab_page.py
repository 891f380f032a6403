from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_of_lab", ROOT / "benchmarks" / "lab.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)
    spec.loader.exec_module(benchmark)
    text = (ROOT / "docs" / "results" / "lab.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "docs" / "results" / "lab").glob("*.json"))
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    assert set(kept) == set(benchmark.PARTS)
    assert benchmark.whole(text, kept) == text
    pictures = {file.name for file in (ROOT / "docs" / "results" / "lab").glob("*.png")}
    assert all(f"lab/{name}" in text for name in pictures)
