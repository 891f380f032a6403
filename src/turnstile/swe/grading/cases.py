"""What the gate asks of a task: gradings of its repair, of no change, and of cheats. `problems.cases` answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turnstile.swe.grading.grader import Verdict
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
    """Tasks that can be checked."""

    @property
    def cheats(self) -> Sequence[str]:
        """The names of the cheats there are."""
        ...

    def pile(self, task: Task) -> str:
        """What the task shares its tests with: cheats are tried on some tasks of each pile. Raises TaskError."""
        ...

    async def open(self, task: Task) -> Case:
        """The task, ready to be graded. Raises TaskError where what it needs cannot be had or is not what it was."""
        ...
