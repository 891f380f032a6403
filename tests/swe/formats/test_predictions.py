from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from episodes import group, trajectory
from turnstile.errors import ConfigError
from turnstile.swe.formats.predictions import write_predictions
from turnstile.types import Group, Task


def played(name: str, *patches: str | None) -> Group:
    attempts = [trajectory(attempt=n, signals={} if p is None else {"patch": p}) for n, p in enumerate(patches)]
    return replace(group(name), task=Task(id=name, env="swe_shell"), trajectories=tuple(attempts))


def test_predictions_have_a_line_for_each_task(tmp_path: Path) -> None:
    groups = [played("a__b-1", "diff --git a/x b/x\n", "another"), played("a__b-2", None)]
    assert write_predictions(tmp_path / "new" / "predictions.jsonl", "model", groups) == 2
    lines = (tmp_path / "new" / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"instance_id": "a__b-1", "model_name_or_path": "model", "model_patch": "diff --git a/x b/x\n"},
        {"instance_id": "a__b-2", "model_name_or_path": "model", "model_patch": ""},
    ]


def test_episodes_without_a_patch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no episode recorded a patch"):
        write_predictions(tmp_path / "p.jsonl", "model", [played("a", None)])
