"""Repository tasks in the form that the gate checks, graded as episodes are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from turnstile.swe.bug import ENV, Bug
from turnstile.swe.formats.instance import instance_of
from turnstile.swe.grading.grader import Verdict, normal
from turnstile.swe.grading.judge import trouble
from turnstile.swe.grading.probes import PROBES, Probe, Scene
from turnstile.swe.problems.base import Problem
from turnstile.swe.problems.copy import Change, Copy
from turnstile.swe.problems.problems import Problems
from turnstile.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemCases:
    """Generated tasks and instances in the form that the gate checks (see `grading.cases.Cases`)."""

    problems: Problems
    probes: Mapping[str, Probe] = field(default_factory=lambda: PROBES)

    @property
    def cheats(self) -> Sequence[str]:
        return tuple(self.probes)

    def pile(self, task: Task) -> str:
        return Bug.of(task).label if task.env == ENV else instance_of(task).repo or "-"

    async def open(self, task: Task) -> ProblemCase:
        problem = await self.problems.of(task)
        await problem.ignored(())  # prepares its image now, so that errors in doing so come from this call
        return ProblemCase(problem=problem, probes=self.probes)


@dataclass(kw_only=True, slots=True)
class ProblemCase:
    """One problem in the form that the gate checks; `has_repair` sets `repair` if the task has one."""

    problem: Problem
    probes: Mapping[str, Probe]
    repair: Change | None = None

    async def has_repair(self) -> bool:
        self.repair = await self.problem.gold()
        return self.repair is not None

    async def gold(self, repeat: int) -> Verdict:
        return await self.problem.grade(self.repair or Change(), repeat=repeat)

    async def empty(self, repeat: int) -> Verdict:
        return await self.problem.grade(Change(), repeat=repeat)

    async def cheat(self, name: str) -> Verdict | None:
        """Return the verdict on a cheat; None if there is no Python file to plant it in."""
        copy = await self.problem.open()
        try:
            file = await self._choose_file(copy)
            if file is None:
                return None
            text = (await copy.sandbox.read(file)).decode("utf-8", "surrogateescape")
            tests = (*self.problem.fail_to_pass, *self.problem.pass_to_pass)
            scene = Scene(sandbox=copy.sandbox, file=file, text=text, tests=tests, import_root=self.problem.import_root)
            left = await self.probes[name](scene)
        finally:
            await copy.close()
        return await self.problem.grade(Change(files={normal(path): data for path, data in left.items()}))

    async def _choose_file(self, copy: Copy) -> str | None:
        """Return the file to plant a cheat in; None if there is none.

        It is a faulty file if one is known, else the `__init__.py` of the largest package, which is imported first.
        """
        files = [path for path in copy.base if path.endswith(".py")]
        faulty = sorted(self.problem.suspects.intersection(files))
        if faulty:
            return faulty[0]
        left_out = frozenset(await self.problem.ignored(files))
        sizes = Counter(str(folder) for path in files for folder in PurePosixPath(path).parents)

        def rank(path: str) -> tuple[bool, int, str]:
            inner = PurePosixPath(path)
            return inner.name != "__init__.py", -sizes[str(inner.parent)], path

        return min((path for path in files if path not in left_out), key=rank, default=None)

    def trouble(self, gold: Verdict | None, empty: Verdict) -> str | None:
        return trouble(gold, empty, must_fail=self.problem.must_fail, must_pass=self.problem.pass_to_pass)
