from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from turnstile.errors import TaskError
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.bug import Bug
from turnstile.swe.bugs.make import Made
from turnstile.swe.grading import notes
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.notes import failed_before
from turnstile.swe.split import shuffle_tasks
from turnstile.swe.try_tasks import Step, Tried, try_tasks
from turnstile.types import Task


@pytest.fixture
def made(reference: Any, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setenv("TURNSTILE_CACHE", str(reference.cache))
    notes.place().unlink(missing_ok=True)
    return reference.made


@pytest.fixture
def broken(made: Made) -> Callable[..., Task]:
    """Makes a task out of a good one."""
    return lambda **changes: Task(id="broken", env="swe", data={**made.tasks[0].data, **changes})


async def test_packages_are_fetched_and_a_sample_is_tried(made: Made, grader: CodeGrader) -> None:
    steps: list[Step] = []
    (checked,) = await try_tasks(made.tasks, sample=2, grader=grader, progress=steps.append)
    assert checked.package.label == "tiny-1.0"
    assert (remembered(checked), checked.off, checked.usable) == ([False, False], [], True)
    assert 2 < grader.runs <= 4  # the bug and the repair of each, repairs that are equal once
    assert (steps[0].stage, steps[0].done, steps[0].total) == ("fetch", 0, 1)
    assert (steps[-1].stage, steps[-1].done, steps[-1].total) == ("check", 1, 1)


def remembered(checked: Tried) -> list[bool]:
    return [one.remembered for one in checked.sound]


async def test_sound_tasks_are_not_tried_again(made: Made, grader: CodeGrader) -> None:
    await try_tasks(made.tasks, grader=grader)
    (checked,) = await try_tasks(made.tasks, sample=2, grader=grader)
    assert remembered(checked) == [True, False]
    runs = grader.runs
    (checked,) = await try_tasks(made.tasks, sample=2, grader=grader)
    assert (remembered(checked), grader.runs) == ([True, True], runs)


async def test_an_unsound_task_is_tried_again_and_not_noted_as_failed(
    made: Made, broken: Callable[..., Task], grader: CodeGrader
) -> None:
    """A sample says how a package behaves here; it is the gate that decides on tasks."""
    task = broken(f2p=["tests/test_tiny.py::gone"])
    for _ in range(2):
        (checked,) = await try_tasks([task], grader=grader)
        assert [one.remembered for one in checked.off] == [False]
    assert failed_before([task]) == {}


async def test_no_task_is_tried_when_none_is_asked_for(made: Made) -> None:
    (checked,) = await try_tasks(made.tasks, sample=0)
    assert (checked.sound, checked.off, checked.usable) == ([], [], True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"f2p": ["tests/test_tiny.py::test_broken"]}, "the repair scores 0: tests/test_tiny.py::test_broken (assert"),
        ({"f2p": ["tests/test_tiny.py::gone"]}, "the repair scores 0: tests/test_tiny.py::gone (no such test)"),
        ({"f2p": ["tests/test_tiny.py::test_nothing"]}, "no change scores 1: tests/test_tiny.py::test_nothing passes"),
        ({"p2p": [], "f2p": ["tests/test_flaky.py::test_skipped"]}, "(it was skipped)"),
        ({"col": 0}, "is not the file the task was made from"),
    ],
)
async def test_an_unsound_task_is_reported_with_a_reason(
    made: Made, broken: Callable[..., Task], grader: CodeGrader, changes: dict[str, Any], says: str
) -> None:
    (checked,) = await try_tasks([broken(**changes)], grader=grader)
    assert says in str(checked.off[0].why)
    assert not checked.usable


async def test_a_test_that_must_pass_but_fails_with_the_bug_is_reported(
    made: Made, broken: Callable[..., Task], grader: CodeGrader
) -> None:
    bug = next(Bug.of(task) for task in made.tasks if len(Bug.of(task).f2p) > 1)
    (checked,) = await try_tasks([broken(**{**bug.data(), "f2p": bug.f2p[:1], "p2p": bug.f2p[1:]})], grader=grader)
    assert f"with the bug {bug.f2p[1]} is to pass and does not" in str(checked.off[0].why)


async def test_one_unsound_task_does_not_make_its_package_unusable(
    made: Made, broken: Callable[..., Task], grader: CodeGrader
) -> None:
    tasks = [broken(f2p=["tests/test_tiny.py::gone"]), *made.tasks]
    seed = next(seed for seed in count() if shuffle_tasks(tasks, seed)[0].id == "broken")
    (checked,) = await try_tasks(tasks, seed=seed, grader=grader)
    assert ([one.task.id for one in checked.off], len(checked.sound), checked.usable) == (["broken"], 1, True)


async def test_a_package_with_another_source_tree_is_refused(made: Made, broken: Callable[..., Task]) -> None:
    with pytest.raises(TaskError, match="the source tree differs"):
        await try_tasks([broken(digest="f" * 16)])


async def test_tasks_of_a_package_must_agree_on_its_requirements(made: Made, broken: Callable[..., Task]) -> None:
    with pytest.raises(TaskError, match=r"some tasks of tiny-1\.0 need nothing, others six==1\.0: .* same --extra"):
        await try_tasks([*made.tasks, broken(requires=["six==1.0"])])


async def test_a_busy_machine_is_not_the_tasks_fault(made: Made, sandboxes: LocalSandboxes) -> None:
    hurried = CodeGrader(sandboxes, limits=Limits(seconds=0.001))
    (checked,) = await try_tasks(made.tasks, grader=hurried)
    assert (checked.sound, checked.off, checked.usable) == ([], [], True)
    assert checked.unknown is not None
    assert "is the machine busy?" in checked.unknown or "wrote no report" in checked.unknown


async def test_broken_sandboxes_are_not_the_tasks_fault(made: Made, tmp_path: Path) -> None:
    closed = LocalSandboxes(root=tmp_path)
    await closed.close()
    (checked,) = await try_tasks(made.tasks, grader=CodeGrader(closed))
    assert (checked.sound, checked.off, checked.usable) == ([], [], True)
    assert checked.unknown == "these sandboxes were closed"
