"""The gradings that the gate asks for, on a task's repair, on no change, and on cheats (see `problems.cases`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turnstile.swe.grading.grader import Verdict
from turnstile.types import Task


class Case(Protocol):
    """One task that can be checked.

    Gradings raise InfrastructureError if there is no verdict. Those that differ in `repeat` are run anew.
    """

    async def has_repair(self) -> bool:
        """Prepare the task's own repair, and return whether there is one; without one, `gold` is not called.

        Raises TaskError for a repair that cannot be used.
        """
        ...

    async def gold(self, repeat: int) -> Verdict:
        """Return the verdict on the task's own repair."""
        ...

    async def empty(self, repeat: int) -> Verdict:
        """Return the verdict on the unchanged code."""
        ...

    async def cheat(self, name: str) -> Verdict | None:
        """Return the verdict on what the named cheat hands in; None if the cheat cannot be tried on this task."""
        ...

    def trouble(self, gold: Verdict | None, empty: Verdict) -> str | None:
        """Return what the two verdicts show to be wrong with the task, as a clause; None if nothing."""
        ...


class Cases(Protocol):
    """Gives access to tasks that can be checked."""

    @property
    def cheats(self) -> Sequence[str]:
        """The names of the available cheats."""
        ...

    def pile(self, task: Task) -> str:
        """Return the name of what the task shares its tests with; cheats are tried on some tasks of each pile.

        Raises TaskError for a task that cannot be used.
        """
        ...

    async def open(self, task: Task) -> Case:
        """Return the task, ready to be graded. Raises TaskError if something it needs is unavailable or has changed."""
        ...
