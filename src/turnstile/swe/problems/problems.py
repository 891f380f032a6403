"""Convert tasks to problems, in one place that knows both kinds and keeps what the episodes of a run share."""

from __future__ import annotations

from collections import OrderedDict

from turnstile.sandboxes.base import Limits
from turnstile.swe.bug import ENV, Bug
from turnstile.swe.formats.instance import INSTANCE, instance_of
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.memo import Memo
from turnstile.swe.grading.suite import SUITE_LIMITS, Outcome
from turnstile.swe.problems.base import Problem
from turnstile.swe.problems.image import Prepared
from turnstile.swe.problems.instance import InstanceProblem
from turnstile.swe.problems.made import MadeProblem
from turnstile.types import Task

REPOSITORY = (ENV, INSTANCE)
"""The environments that tasks of repositories name."""
_KEPT = 1024  # problems


class Problems:
    """The problems of a run's tasks.

    Images are prepared once and verdicts remembered for all episodes; `limits` apply to the test command of an
    instance.
    """

    def __init__(self, grader: CodeGrader, *, limits: Limits = SUITE_LIMITS, memo: int = 50_000) -> None:
        self.grader = grader
        self._limits = limits
        self._outcomes: Memo[Outcome] = Memo(memo, passing=lambda outcome: outcome.waited_out)
        self._images: Memo[Prepared] = Memo(memo, passing=lambda _: False)
        self._known: OrderedDict[str, tuple[Task, Problem]] = OrderedDict()

    async def of(self, task: Task) -> Problem:
        """Return a task's problem.

        Raises TaskError if the task is not a repository task, or something that it needs is missing.
        """
        known = self._known.get(task.id)
        if known is not None and known[0] == task:
            self._known.move_to_end(task.id)
            return known[1]
        if task.env == ENV:
            problem: Problem = await MadeProblem.of(task.id, Bug.of(task), self.grader)
        else:
            problem = InstanceProblem(
                instance_of(task),
                self.grader.bench.sandboxes,
                images=self._images,
                outcomes=self._outcomes,
                limits=self._limits,
            )
        self._known[task.id] = (task, problem)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return problem

    async def close(self) -> None:
        """End the preparations and gradings under way. The grader and the sandboxes are left to their owners."""
        await self._outcomes.close()
        await self._images.close()
