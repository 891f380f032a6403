"""A run trained again from its record."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import guess_run
from turnstile.cli.main import run as command
from turnstile.runs.train import train

WEIGHTS = "checkpoints/step-000003/model/model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Played ahead, so that its tokens are of several versions, and not with `deterministic`."""
    folder = tmp_path_factory.mktemp("original")
    recipe = guess_run.recipe(folder, steps=3)
    changed = {
        "rollout": {"max_staleness": 1},
        "engine": {"deterministic": False},
        "eval": {"before": False, "every": 0},
    }
    recipe = recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=keys) for name, keys in changed.items()}
    )
    train(recipe, run=folder / "run")
    return folder / "run"


def test_a_replay_gives_the_same_weights(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train", "--replay", str(original), "--out", str(tmp_path / "again")]) == 0
    assert f"every step as in {original}, to the last bit" in capsys.readouterr().out
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (original / WEIGHTS).read_bytes()
    assert not (tmp_path / "again/evaluations").exists()
    assert command(["audit", str(tmp_path / "again")]) == 0
    assert command(["audit", str(original)]) == 0


@pytest.mark.slow
def test_a_replay_that_differs_is_reported(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The original's record is of another learning rate than its recipe says."""
    other = tmp_path / "other"
    shutil.copytree(original, other)
    resolved = json.loads((other / "resolved.json").read_text())
    resolved["recipe"]["train"]["lr"] *= 2
    (other / "resolved.json").write_text(json.dumps(resolved))
    assert command(["train", "--replay", str(other), "--out", str(tmp_path / "again")]) == 1
    assert re.search(r"again parted from .*other at step [123]: the trainer's log-prob", capsys.readouterr().err)


def test_a_record_that_ends_early_is_reported(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(original, cut)
    (cut / "record/000003-train.jsonl.gz").unlink()
    assert command(["train", "--replay", str(cut), "--out", str(tmp_path / "again")]) == 1
    assert "has no record of group 'train/3/0/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [([], "give a recipe"), (["x.toml", "--replay", "y"], "no other"), (["--replay", "y", "--dry-run"], "mode")],
)
def test_missing_or_conflicting_arguments_of_train_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["train", *words]) == 2
    assert told in capsys.readouterr().err
