from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dockerd import ULIMITS, Dockerd
from turnstile.config import Kind, Recipe, make_recipe
from turnstile.errors import TaskError
from turnstile.runs.task_validation import check_tasks, containers_of, refuse_failed
from turnstile.runs.train import train
from turnstile.swe.formats.instance import Instance, as_task
from turnstile.swe.grading.findings import Ask, CheckedTask
from turnstile.swe.grading.notes import Notes, failed_before
from turnstile.tasks.base import write_tasks
from turnstile.types import Task

GOOD, BAD = Task(id="good", env="swe", data={"n": 1}), Task(id="bad", env="swe", data={"n": 2})


def test_instances_are_checked_in_containers(engine: Dockerd, instance: Instance) -> None:
    where = Kind.model_validate({"kind": "container", "daemon": engine.address, "resources": {"ulimits": ULIMITS}})
    good, bad = (
        as_task(instance),
        as_task(replace(instance, id="bad", patch="", fail_to_pass=("tests/none.py::test_a",))),
    )
    gone = as_task(replace(instance, id="gone", image="turnstile-no-such-image"))
    found = check_tasks([good, bad, gone], containers=where, repeats=1, probed=0)
    assert [(one.task.id, one.gold, one.empty) for one in found[:2]] == [(good.id, (1,), (0,)), ("bad", (), (0,))]
    assert found[0].why is None
    assert str(found[1].why).startswith("its tests do not run, and it has no repair: ")
    said = found[2].why or found[2].unknown  # a registry that says no, or that nobody can reach
    assert "turnstile-no-such-image" in str(said)
    assert failed_before([gone]) == {}
    assert engine.containers() == []


def test_instances_start_from_their_own_images_with_the_knobs_of_the_section() -> None:
    task = as_task(Instance(id="i", problem="", image="mine"))
    given = {"resources": {"memory_mb": 8192}, "isolation": {"user": "7:7"}}
    section = Kind.model_validate({"kind": "container", "dockerfile": "Dockerfile", **given})
    knobs = {"image": "mine", **given, "pool": {"warm": 0}}
    assert containers_of(task, section).knobs == knobs
    assert containers_of(task).knobs == {"image": "mine", "isolation": {"user": "0:0"}, "pool": {"warm": 0}}


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


def test_only_failed_tasks_that_a_run_uses_are_refused(recipe: Recipe) -> None:
    note(CheckedTask(task=BAD, trouble="off"), CheckedTask(task=GOOD, unknown="broke"))
    refuse_failed(recipe, [GOOD], [GOOD])
    with pytest.raises(TaskError, match=r"heldout\.jsonl: 1 of its tasks failed"):
        refuse_failed(recipe, [GOOD], [BAD])
