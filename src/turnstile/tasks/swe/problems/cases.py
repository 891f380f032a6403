"""Instances as the gate asks for them: repair, no change and cheats, graded as episodes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnstile.tasks.swe.formats.instance import instance_of
from turnstile.tasks.swe.grading.grader import Verdict, normal
from turnstile.tasks.swe.grading.probes import PROBES, Probe, Scene
from turnstile.tasks.swe.problems.base import Problem
from turnstile.tasks.swe.problems.copy import Change
from turnstile.tasks.swe.problems.problems import Problems
from turnstile.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemCases:
    """Tasks that are instances (see `grading.cases.Cases`)."""

    problems: Problems
    probes: Mapping[str, Probe] = field(default_factory=lambda: PROBES)

    @property
    def cheats(self) -> Sequence[str]:
        return tuple(self.probes)

    def pile(self, task: Task) -> str:
        return instance_of(task).repo or "-"

    async def open(self, task: Task) -> ProblemCase:
        problem = await self.problems.of(task)
        return ProblemCase(problem=problem, probes=self.probes, repair=await problem.gold())


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemCase:
    """One problem; `repair` is None where the task carries none."""

    problem: Problem
    probes: Mapping[str, Probe]
    repair: Change | None

    @property
    def has_repair(self) -> bool:
        return self.repair is not None

    async def gold(self, repeat: int) -> Verdict:
        return await self.problem.grade(self.repair or Change(), repeat=repeat)

    async def empty(self, repeat: int) -> Verdict:
        return await self.problem.grade(Change(), repeat=repeat)

    async def cheat(self, name: str) -> Verdict | None:
        """None where no file is known for a cheat to begin with."""
        copy = await self.problem.open()
        try:
            files = [file for file in sorted(self.problem.suspects) if file.endswith(".py") and file in copy.base]
            if not files:
                return None
            text = (await copy.sandbox.read(files[0])).decode("utf-8", "surrogateescape")
            tests = (*self.problem.fail_to_pass, *self.problem.pass_to_pass)
            left = await self.probes[name](Scene(sandbox=copy.sandbox, file=files[0], text=text, tests=tests))
        finally:
            await copy.close()
        return await self.problem.grade(Change(files={normal(path): data for path, data in left.items()}))

    def trouble(self, gold: Verdict | None, empty: Verdict) -> str | None:
        if gold is not None and not gold.resolved:
            first = gold.failed[0]
            return f"the repair scores 0: {gold.problem or f'{first} ({gold.messages.get(first)})'}"
        return "no change scores 1" if empty.resolved else None
