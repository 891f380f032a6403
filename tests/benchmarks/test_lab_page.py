from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.research import lab
from benchmarks.research.lab_page import whole
from benchmarks.research.lab_tables import to_csv
from turnstile.lab.processes import make
from turnstile.lab.study import Line, Setting, study
from turnstile.lab.subjects import subject

ROOT = Path(__file__).parents[2]


def test_the_page_says_what_is_kept() -> None:
    text = (ROOT / "docs" / "results" / "lab.md").read_text(encoding="utf-8")
    files = sorted((ROOT / "docs" / "results" / "lab").glob("*.json"))
    kept = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    assert set(kept) == set(lab.PARTS)
    assert whole(text, kept) == text
    assert all(f"lab/{file.name}" in text for file in (ROOT / "docs" / "results" / "lab").glob("*.png"))
    tables = {file.stem: file.read_text(encoding="utf-8") for file in (ROOT / "docs/results/lab").glob("*.csv")}
    assert tables == {name: to_csv(grid) for name, grid in lab.tables(kept).items()}
    assert all(f"(lab/{name}.csv)" in text for name in tables)


def test_parts_that_were_not_measured_are_left_out() -> None:
    assert "## Direction" not in whole("# Title\n\n", {})


def test_a_command_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an unfinished run had measured is taken from there, and only the rest is measured."""
    monkeypatch.setattr(lab, "KEPT", tmp_path)
    subjects = [subject("rloo"), subject("grpo")]
    settings = [Setting(process=make("stopping", horizon=2), size=2, groups=32, seed=seed) for seed in range(2)]
    asked: list[tuple[str, int]] = []

    def measured(missing: Sequence[Any], settings: Sequence[Setting]) -> list[Line]:
        asked.extend((each.label, settings[0].seed) for each in missing)
        if settings[0].seed == 1 and len(asked) < 5:
            raise KeyboardInterrupt
        return study(missing, settings)

    with pytest.raises(KeyboardInterrupt):
        lab.lines_of("part", subjects, settings, None, measured)
    assert asked == [("rloo", 0), ("grpo", 0), ("rloo", 1), ("grpo", 1)]
    lines = lab.lines_of("part", subjects, settings, None, measured)
    assert asked[4:] == [("rloo", 1), ("grpo", 1)]
    assert [(line["estimator"], line["seed"]) for line in lines] == asked[:2] + asked[4:]
    more = [*subjects, subject("salt")]
    (tmp_path / "part.partial").unlink()
    lab.lines_of("part", more, settings, {"lines": lines}, measured)  # --add
    assert asked[6:] == [("salt", 0), ("salt", 1)]
