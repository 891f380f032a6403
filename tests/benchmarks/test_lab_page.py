from __future__ import annotations

import json
from pathlib import Path

from lab_page import whole

ROOT = Path(__file__).parents[2]


def test_the_page_says_what_is_kept() -> None:
    text = (ROOT / "docs" / "results" / "lab.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "docs" / "results" / "lab").glob("*.json"))
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    assert set(kept) == {"gradients", "branched", "sweeps", "losses", "curves", "game", "hacking"}
    assert whole(text, kept) == text
    assert all(f"lab/{file.name}" in text for file in (ROOT / "docs" / "results" / "lab").glob("*.png"))


def test_parts_that_were_not_measured_are_left_out() -> None:
    assert "## Direction" not in whole("# Title\n\n", {})
