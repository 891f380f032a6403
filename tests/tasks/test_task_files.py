from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from turnstile.errors import TaskError
from turnstile.tasks.base import TaskSampler, load_tasks, write_tasks
from turnstile.types import Task

TASKS = [Task(id=f"t{number}", env="guess", data={"n": number}, seed=number) for number in range(7)]


def test_write_then_load_gives_the_same_tasks(tmp_path: Path) -> None:
    tasks = [*TASKS, Task(id="x", env="swe", prompt="häh\u2028?", data={"a": [1, None, {"b": "\n"}]})]
    assert write_tasks(tmp_path / "deep" / "tasks.jsonl", tasks) == 8
    assert load_tasks(tmp_path / "deep" / "tasks.jsonl") == tasks
    assert len((tmp_path / "deep" / "tasks.jsonl").read_bytes().split(b"\n")) == 9
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["tasks.jsonl"]  # no temporary file is left


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", ":3: not JSON"),
        ("[1]", ":3: a task is a JSON object, this is list"),
        ('{"id": "a", "env": "g", "promt": "x"}', ":3: unknown field 'promt'; did you mean 'prompt'?"),
        ('{"env": "g"}', ":3: field 'id' is missing or empty"),
        ('{"id": "", "env": "g"}', ":3: field 'id' is missing or empty"),
        ('{"id": 3, "env": "g"}', ":3: field 'id' must be str, not int"),
        ('{"id": "a", "env": "g", "seed": true}', ":3: field 'seed' must be int, not bool"),
        ('{"id": "a", "env": "g", "data": []}', ":3: field 'data' must be dict, not list"),
        ('{"id": "t0", "env": "g"}', ":3: id 't0' is already used in line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "t0", "env": "g"}\n\n' + line + "\n")
    with pytest.raises(TaskError) as caught:
        load_tasks(path)
    assert str(caught.value).startswith(f"{path}{says}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, says in (("missing", "cannot be read"), ("empty", "has no task"), ("binary", "not UTF-8")):
        with pytest.raises(TaskError, match=says):
            load_tasks(tmp_path / name)


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    sampler = TaskSampler(TASKS, seed=3)
    epochs = [[task.id for task in sampler.next(7)] for _ in range(4)]
    assert all(sorted(epoch) == sorted(task.id for task in TASKS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert sampler.epoch == 3


def test_requests_may_cross_epochs() -> None:
    sampler = TaskSampler(TASKS, seed=3)
    assert set(Counter(task.id for task in sampler.next(21)).values()) == {3}


def test_the_size_of_requests_does_not_change_the_order() -> None:
    one, many = TaskSampler(TASKS, seed=1), TaskSampler(TASKS, seed=1)
    assert [one.next(1)[0] for _ in range(15)] == many.next(15)
    assert TaskSampler(TASKS, seed=2).next(7) != TaskSampler(TASKS, seed=1).next(7)


@pytest.mark.parametrize("before", [0, 5, 7, 9])
def test_a_restored_sampler_goes_on_where_the_state_was_taken(before: int) -> None:
    sampler = TaskSampler(TASKS, seed=5)
    sampler.next(before)
    state = json.loads(json.dumps(sampler.state()))
    rest = sampler.next(20)
    other = TaskSampler(TASKS, seed=5)
    other.restore(state)
    assert other.next(20) == rest


def test_sampler_refuses_states_of_other_runs() -> None:
    with pytest.raises(TaskError, match="at least one task"):
        TaskSampler([])
    with pytest.raises(TaskError, match="tasks 7:"):
        TaskSampler(TASKS[:3]).restore(TaskSampler(TASKS).state())
    with pytest.raises(TaskError, match="seed 1, this run has 0"):
        TaskSampler(TASKS).restore(TaskSampler(TASKS, seed=1).state())


def test_sampler_refuses_other_tasks_of_equal_number() -> None:
    others = [dataclasses.replace(task, id=f"{task.id}-other") for task in TASKS]
    with pytest.raises(TaskError, match="use the same tasks"):
        TaskSampler(others).restore(TaskSampler(TASKS).state())
