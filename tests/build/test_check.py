from __future__ import annotations

from pathlib import Path

import pytest

from turnstile.build.check import refuse_failed
from turnstile.build.train import train
from turnstile.config import Recipe, make_recipe
from turnstile.errors import TaskError
from turnstile.tasks.base import write_tasks
from turnstile.tasks.swe.grading.findings import Ask, CheckedTask
from turnstile.tasks.swe.grading.notes import Notes
from turnstile.types import Task

GOOD, BAD = Task(id="good", env="swe", data={"n": 1}), Task(id="bad", env="swe", data={"n": 2})


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path / "cache"))
    for name in ("train", "heldout"):
        write_tasks(tmp_path / f"{name}.jsonl", [GOOD, BAD])
    return make_recipe({"tasks": {"train": "train.jsonl", "heldout": "heldout.jsonl"}}, folder=tmp_path)


def note(*found: CheckedTask) -> None:
    for one in found:
        Notes().add(one, Ask())


def test_a_file_that_failed_its_check_is_not_trained_on(recipe: Recipe, tmp_path: Path) -> None:
    note(CheckedTask(task=GOOD), CheckedTask(task=BAD, wins=("edit_tests",)))
    with pytest.raises(TaskError, match=r"1 of its tasks failed their check, for example bad \(a cheat scores 1: edit"):
        train(recipe, run=tmp_path / "run", heldout=[])
    allowed = recipe.model_copy(update={"tasks": recipe.tasks.model_copy(update={"allow_failed": True})})
    refuse_failed(allowed, [GOOD, BAD], [])


def test_only_what_a_run_uses_counts(recipe: Recipe) -> None:
    note(CheckedTask(task=BAD, trouble="off"), CheckedTask(task=GOOD, unknown="broke"))
    refuse_failed(recipe, [GOOD], [GOOD])
    with pytest.raises(TaskError, match=r"heldout\.jsonl: 1 of its tasks failed"):
        refuse_failed(recipe, [GOOD], [BAD])
