"""Tasks to problems: one place that knows both kinds, and keeps what all episodes of a run share."""

from __future__ import annotations

from collections import OrderedDict

from turnstile.errors import TaskError
from turnstile.sandboxes.base import Limits
from turnstile.tasks.swe.bug import ENV, Bug
from turnstile.tasks.swe.formats.instance import Instance
from turnstile.tasks.swe.grading.grader import Grader
from turnstile.tasks.swe.grading.memo import Memo
from turnstile.tasks.swe.grading.suite import SUITE_LIMITS, Outcome
from turnstile.tasks.swe.problems.base import Problem
from turnstile.tasks.swe.problems.instance import InstanceProblem
from turnstile.tasks.swe.problems.made import MadeProblem
from turnstile.types import Task

INSTANCE = "swe_shell"
"""The environment of tasks that hold an instance; made ones, of `bug.ENV`, can be tried in it too."""
REPOSITORY = (ENV, INSTANCE)
_KEPT = 1024  # problems


class Problems:
    """The problems of a run's tasks. Images are made ready and verdicts remembered once for all episodes; `limits`
    hold for the test command of an instance."""

    def __init__(self, grader: Grader, *, limits: Limits = SUITE_LIMITS, memo: int = 50_000) -> None:
        self.grader = grader
        self._limits = limits
        self._memo: Memo[Outcome] = Memo(memo, passing=lambda outcome: outcome.waited_out)
        self._known: OrderedDict[str, tuple[Task, Problem]] = OrderedDict()

    async def of(self, task: Task) -> Problem:
        """A task's problem. Raises TaskError where the task is none of a repository, or what it needs is not there."""
        known = self._known.get(task.id)
        if known is not None and known[0] == task:
            self._known.move_to_end(task.id)
            return known[1]
        if task.env == ENV:
            problem: Problem = await MadeProblem.of(task.id, Bug.of(task), self.grader)
        else:
            problem = InstanceProblem(instance_of(task), self.grader.bench.sandboxes, self._memo, limits=self._limits)
        self._known[task.id] = (task, problem)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return problem

    async def close(self) -> None:
        """End the runs under way. Grader and sandboxes are their owners' to close."""
        await self._memo.close()


def instance_of(task: Task) -> Instance:
    """The instance that a task holds. Raises TaskError where it holds none."""
    if task.env != INSTANCE:
        raise TaskError(f"task {task.id}: env is {task.env!r}, a repository task has one of {', '.join(REPOSITORY)}")
    return Instance.from_json({**task.data, "id": task.data.get("id", task.id)})


def as_task(instance: Instance) -> Task:
    """An instance as a task that `instance_of` reads back."""
    return Task(id=instance.id, env=INSTANCE, data=instance.to_json())
