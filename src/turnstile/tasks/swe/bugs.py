"""Grading bugs: a task's package, its tests and its import path, put to the grader."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from turnstile.tasks.swe.grader import Grader
from turnstile.tasks.swe.instance import Bug, package_of
from turnstile.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class BugVerdict:
    """What a bug's tests said of one state of the code; `message` is what the first failing test says."""

    resolved: bool
    f2p_passed: int
    f2p_total: int
    p2p_passed: int
    p2p_total: int
    message: str


class BugGrader:
    """Grades states of the code of `tasks.swe.instance.Bug` tasks with a `Grader`."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader

    async def grade(self, task: Task, files: Mapping[str, bytes]) -> BugVerdict:
        """The verdict of `files` over the pristine tree. Raises InfrastructureError where there is none."""
        bug = Bug.of(task)
        package = package_of(bug)
        paths = [package.import_root, ".", str(package.deps)]
        verdict = await self._grader.grade(
            package.tree,
            files,
            fail_to_pass=bug.f2p,
            pass_to_pass=bug.p2p,
            env={"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
        )
        failing = [verdict.messages[test] for test in (*bug.f2p, *bug.p2p) if test in verdict.messages]
        return BugVerdict(
            resolved=verdict.resolved,
            f2p_passed=verdict.fail_to_pass_passed,
            f2p_total=verdict.fail_to_pass_total,
            p2p_passed=verdict.pass_to_pass_passed,
            p2p_total=verdict.pass_to_pass_total,
            message=failing[0] if failing else verdict.problem or "",
        )
