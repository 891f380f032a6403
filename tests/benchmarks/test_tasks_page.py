from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.research import tasks

ROOT = Path(__file__).parents[2]


def test_the_page_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "results" / "tasks.md").read_text(encoding="utf-8")
    assert tasks.page() == text
    assert tasks.table("T", ("a", "b"), [[1, "x"]]) == "## T\n\n| a | b |\n|---|---|\n| 1 | x |"
    assert (tasks.share(1, 3), tasks.share(0, 0), tasks.mean([]), tasks.mean([1, 0])) == (
        "33%", "-", "-", "0.50",
    )  # fmt: skip
