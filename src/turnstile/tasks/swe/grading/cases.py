"""What the gate asks of a task, whatever kind it is of: gradings of its repair, of no change, and of cheats."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turnstile.tasks.swe.bug import Bug, package_of
from turnstile.tasks.swe.grading.grader import Grader, Verdict
from turnstile.tasks.swe.grading.judge import judge, judge_files, trouble
from turnstile.tasks.swe.grading.probes import PROBES, Probe, Scene
from turnstile.tasks.swe.packages.source import Package
from turnstile.types import Task


class Case(Protocol):
    """One task that can be checked. Gradings raise InfrastructureError where there is no verdict; those that
    differ in `repeat` are run anew."""

    async def has_repair(self) -> bool:
        """Whether the task carries its own repair, which is made ready. Where it does not, `gold` is not asked.
        Raises TaskError for one that cannot be used."""
        ...

    async def gold(self, repeat: int) -> Verdict:
        """The verdict on the task's own repair."""
        ...

    async def empty(self, repeat: int) -> Verdict:
        """The verdict on no change at all."""
        ...

    async def cheat(self, name: str) -> Verdict | None:
        """The verdict on what the cheat of that name hands in; None where it cannot be tried on this task."""
        ...

    def trouble(self, gold: Verdict | None, empty: Verdict) -> str | None:
        """What the two verdicts say against the task, in a clause; None for nothing."""
        ...


class Cases(Protocol):
    """A kind of task that can be checked."""

    @property
    def cheats(self) -> Sequence[str]:
        """The names of the cheats there are for it."""
        ...

    def pile(self, task: Task) -> str:
        """What the task shares its tests with: cheats are tried on some tasks of each pile. Raises TaskError."""
        ...

    async def open(self, task: Task) -> Case:
        """The task, ready to be graded. Raises TaskError where what it needs cannot be had or is not what it was."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BugCases:
    """Tasks that are bugs in packages."""

    grader: Grader
    probes: Mapping[str, Probe] = field(default_factory=lambda: PROBES)

    @property
    def cheats(self) -> Sequence[str]:
        return tuple(self.probes)

    def pile(self, task: Task) -> str:
        return Bug.of(task).label

    async def open(self, task: Task) -> BugCase:
        bug = Bug.of(task)
        package = await asyncio.to_thread(package_of, bug)
        await self.grader.bench.check_hidden(package, bug.file)
        return BugCase(
            grader=self.grader,
            probes=self.probes,
            bug=bug,
            package=package,
            pristine=bug.pristine_text(package),
            buggy=bug.bugged_text(package),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BugCase:
    """One bug in a package; `pristine` and `buggy` are the texts of its file."""

    grader: Grader
    probes: Mapping[str, Probe]
    bug: Bug
    package: Package
    pristine: str
    buggy: str

    async def has_repair(self) -> bool:
        return True

    async def gold(self, repeat: int) -> Verdict:
        return await judge(self.grader, self.bug, self.package, self.pristine, repeat=repeat)

    async def empty(self, repeat: int) -> Verdict:
        return await judge(self.grader, self.bug, self.package, self.buggy, repeat=repeat)

    async def cheat(self, name: str) -> Verdict:
        """What the cheat leaves behind in a sandbox of its own is graded in another one."""
        buggy = {self.bug.file: self.buggy.encode("utf-8", "surrogatepass")}
        sandbox = await self.grader.bench.sandboxes.start(self.package.tree, deps=self.package.deps)
        try:
            for path, data in buggy.items():
                await sandbox.write(path, data)
            scene = Scene(
                sandbox=sandbox,
                file=self.bug.file,
                text=self.buggy,
                tests=(*self.bug.f2p, *self.bug.p2p),
                import_root=self.package.import_root,
            )
            files = await self.probes[name](scene)
        finally:
            await sandbox.close()
        return await judge_files(self.grader, self.bug, self.package, {**buggy, **files})

    def trouble(self, gold: Verdict | None, empty: Verdict) -> str | None:
        return trouble(self.bug, gold or empty, empty)
