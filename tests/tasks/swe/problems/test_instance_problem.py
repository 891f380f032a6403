"""Instances on a real container engine: what the agent gets, and what of its doings counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from dockerd import Dockerd
from instances import STATEMENT, WORKDIR, instance_image
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.container import ContainerSandboxes
from turnstile.tasks.swe.formats.instance import Instance
from turnstile.tasks.swe.grading.grader import Grader, Verdict
from turnstile.tasks.swe.problems.base import Problem, graded_patch
from turnstile.tasks.swe.problems.copy import Change, Copy
from turnstile.tasks.swe.problems.problems import Problems, as_task

LIMITS = Limits(seconds=60.0)
FIX = "sed -i 's/(len(values) + 1)/len(values)/' calc/__init__.py"


@pytest.fixture(scope="session")
def instance(engine: Dockerd, tmp_path_factory: pytest.TempPathFactory) -> Instance:
    return instance_image(engine, tmp_path_factory.mktemp("instance"))


@pytest.fixture
async def problems(containers: Callable[..., ContainerSandboxes]) -> AsyncIterator[Problems]:
    made = Problems(Grader(containers(user="0:0")))
    yield made
    await made.close()


@pytest.fixture
async def problem(problems: Problems, instance: Instance) -> Problem:
    return await problems.of(as_task(instance))


async def after(problem: Problem, *commands: str) -> Change:
    """What an agent leaves behind that runs these commands."""
    copy = await problem.open()
    try:
        for command in commands:
            code, said, _ = await copy.shell(command, limits=LIMITS)
            assert code == 0, said
        return await copy.change()
    finally:
        await copy.close()


async def test_gold_scores_one_and_nothing_zero(problem: Problem) -> None:
    gold = await problem.gold()
    assert gold is not None
    assert list(gold.files) == ["calc/__init__.py"]
    verdict = await problem.grade(gold)
    assert (verdict.resolved, verdict.problem, verdict.failed) == (True, None, ())
    empty = await problem.grade(Change())
    assert (empty.resolved, empty.failed) == (False, ("tests/test_mean.py::test_mean",))
