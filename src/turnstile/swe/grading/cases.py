"""The gradings of a task that the gate asks for: its repair, no change, and cheats. `problems.cases` does them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turnstile.swe.grading.grader import Verdict
from turnstile.types import Task


class Case(Protocol):
    """One task that can be checked.

    Gradings raise InfrastructureError if there is no verdict; those that differ in `repeat` are run anew.
    """

    async def has_repair(self) -> bool:
        """Return whether the task has its own repair, and prepare it. If it has none, `gold` is not called.

        Raises TaskError for a repair that cannot be used.
        """
        ...

    async def gold(self, repeat: int) -> Verdict:
        """Return the verdict on the task's own repair."""
        ...

    async def empty(self, repeat: int) -> Verdict:
        """Return the verdict on no change at all."""
        ...

    async def cheat(self, name: str) -> Verdict | None:
        """Return the verdict on what the named cheat hands in; None if it cannot be tried on this task."""
        ...

    def trouble(self, gold: Verdict | None, empty: Verdict) -> str | None:
        """Return what the two verdicts show to be wrong with the task, in a clause; None if nothing."""
        ...


class Cases(Protocol):
    """Tasks that can be checked."""

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
        """Return the task, ready to be graded. Raises TaskError if what it needs cannot be had or has changed."""
        ...
