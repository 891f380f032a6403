"""What graders and hints ask of tasks is missed before a model is loaded, in training, dry run and evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import guess_run
from turnstile.config import Recipe, make_recipe
from turnstile.envs.guess import guess_tasks
from turnstile.errors import ConfigError
from turnstile.runs.dry_run import dry_run
from turnstile.runs.evaluate import evaluate
from turnstile.runs.train import train
from turnstile.tasks.base import write_tasks
from turnstile.types import Task
from turnstile.wiring.graders import check_asked

ANSWERS = {"graders": [{"kind": "answer_probabilities"}]}
RUBRIC = {"graders": [{"kind": "rubric", "key": "asks"}], "judge": {"url": "http://127.0.0.1:9/v1"}}
CHECKLIST = {"graders": [{"kind": "checklist", "key": "asks"}], "judge": {"url": "http://127.0.0.1:9/v1"}}
REFERENCE = {"graders": [{"kind": "judge", "reference": "patch"}], "judge": {"url": "http://127.0.0.1:9/v1"}}
HINT = {"hint": {"kind": "rubric"}}
FULL = {"answer": 5, "asks": {"brief": "Is it short?"}, "patch": "-", "rubric": ["Be brief."]}

SAID = [
    (ANSWERS, "answer", "grader 'answer_probabilities': task {!r} has no 'answer' in its data"),
    (RUBRIC, "asks", "task {!r} has no 'asks' in its data, so grader 'rubric' wants criteria"),
    (CHECKLIST, "asks", "task {!r} has no 'asks' in its data, so grader 'checklist' wants items"),
    (REFERENCE, "patch", "judge 'judge': task {!r} has no 'patch' in its data"),
]


def tasks(name: str, lacking: str | None = None) -> list[Task]:
    """Three tasks with all that is asked for, the last without `lacking`."""
    *some, last = (replace(task, id=f"{name}-{n}", data=FULL) for n, task in enumerate(guess_tasks(3, seed=1)))
    return [*some, replace(last, data={key: value for key, value in FULL.items() if key != lacking})]


def recipe(inputs: Path, sections: dict[str, Any], **lacking: str) -> Recipe:
    """One whose model cannot be loaded."""
    made = guess_run.recipe(inputs, sections={"model": {"id": "nobody/none"}, "sft": {}, **sections})
    for name in ("train", "heldout"):
        write_tasks(inputs / f"{name}.jsonl", tasks(name, lacking.get(name)))
    return made


@pytest.mark.parametrize(("sections", "key", "line"), SAID)
def test_an_grader_asks_all_tasks_first(sections: dict[str, Any], key: str, line: str, tmp_path: Path) -> None:
    def refused(use: Any, task: str) -> None:
        with pytest.raises(ConfigError) as caught:
            use()
        assert line.format(task) in str(caught.value)
        assert "\n" not in str(caught.value)

    for name in ("train", "heldout"):
        wanting = recipe(tmp_path, sections, **{name: key})
        refused(lambda: train(wanting, run=tmp_path / "run"), f"{name}-2")  # noqa: B023
        refused(lambda: dry_run(wanting), f"{name}-2")  # noqa: B023
    refused(lambda: evaluate(wanting), "heldout-2")
    assert not (tmp_path / "run" / "record").exists()


def test_a_hint_asks_the_training_tasks_first(tmp_path: Path) -> None:
    wanting = recipe(tmp_path, HINT, train="rubric")
    for use in (lambda: train(wanting, run=tmp_path / "run"), lambda: dry_run(wanting)):
        with pytest.raises(ConfigError, match="at least one criterion for task 'train-2', but it has no 'rubric'"):
            use()
    check_asked(make_recipe(HINT), train=tasks("train"), heldout=tasks("heldout", "rubric"))  # shown to none of them


def test_nothing_is_said_where_nothing_is_missing() -> None:
    for sections in (ANSWERS, RUBRIC, CHECKLIST, REFERENCE, HINT):
        check_asked(make_recipe(sections), train=tasks("train"), heldout=tasks("heldout"))
    of_recipe = {**RUBRIC, "graders": [{"kind": "rubric", "key": "asks", "criteria": {"x": "Is it good?"}}]}
    check_asked(make_recipe(of_recipe), train=tasks("train", "asks"))
