"""The final states of a ledger's attempts by step and by task, to show which tasks are trained on less than others."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstile.records.ledger import State

BINS = 4
"""Number of bins into which tasks are divided, as equal in size as ties allow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Counts by state for a subset of the attempts."""

    issued: int
    admitted: int
    gated_out: int
    given_up: int
    finished: int  # played, but not trained on yet

    @property
    def settled(self) -> int:
        """Number of attempts whose step is finished."""
        return self.admitted + self.gated_out + self.given_up

    @property
    def open(self) -> int:
        """Number of attempts that are not settled: to be played, being played, waiting for their step, or lost."""
        return self.issued - self.settled


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskBalance(Balance):
    """The attempts at one task.

    `turns` is the mean over admitted and gated-out attempts and `outcome` the mean over attempts with an outcome; each
    is None if there are no such attempts.
    """

    task: str
    turns: float | None
    outcome: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBalance(Balance):
    """The attempts issued for one step."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BinShare:
    """A bin of tasks of similar length or difficulty, and its shares of the attempts.

    `of_settled` and `of_admitted` are the bin's shares of all settled attempts and of all attempts that were trained
    on. Attempts that were played ahead but not trained on yet count in neither.
    """

    label: str
    tasks: int
    settled: int
    admitted: int
    of_settled: float
    of_admitted: float


_COUNTED = (State.ADMITTED, State.GATED_OUT, State.GIVEN_UP, State.FINISHED)
_COUNTS = ", ".join(["COUNT(*)", *("SUM(state = ?)" for _ in _COUNTED)])
"""The columns of a `Balance`, in the order of its fields."""


def task_balances(db: sqlite3.Connection) -> list[TaskBalance]:
    """Return the balance of each task, in the order of task ids."""
    played = (State.ADMITTED, State.GATED_OUT)
    rows = db.execute(
        f"SELECT {_COUNTS}, task, AVG(CASE WHEN state IN (?, ?) THEN turns END), AVG(outcome) "
        "FROM attempts GROUP BY task ORDER BY task",
        (*_COUNTED, *played),
    )
    return [TaskBalance(**_balance(row), task=row[-3], turns=row[-2], outcome=row[-1]) for row in rows]


def step_balances(db: sqlite3.Connection) -> list[StepBalance]:
    """Return the balance of each step, in the order of steps."""
    rows = db.execute(f"SELECT {_COUNTS}, step FROM attempts GROUP BY step ORDER BY step", _COUNTED)
    return [StepBalance(**_balance(row), step=row[-1]) for row in rows]


def _balance(row: Sequence[Any]) -> dict[str, int]:
    names = ("issued", "admitted", "gated_out", "given_up", "finished")
    return dict(zip(names, row, strict=False))


def bin_shares(tasks: Sequence[TaskBalance], values: Sequence[float | None], unit: str, without: str) -> list[BinShare]:
    """Return the shares of bins that group the tasks by `values`.

    Tasks with equal values share a bin, and tasks without a value form the last bin, labelled `without`. A task without
    settled attempts is in no bin.
    """
    known = np.array([value for value in values if value is not None], np.float64)
    ordered: NDArray[np.float64] = np.sort(known)
    parts: dict[int, list[int]] = {}
    for index, (task, value) in enumerate(zip(tasks, values, strict=True)):
        if task.settled:
            part = BINS if value is None else int(BINS * np.searchsorted(ordered, value) / len(ordered))
            parts.setdefault(part, []).append(index)
    settled = max(1, sum(task.settled for task in tasks))
    admitted = max(1, sum(task.admitted for task in tasks))
    result = []
    for _, indices in sorted(parts.items()):
        numbers = [value for index in indices if (value := values[index]) is not None]
        low, high = (f"{bound:.4g}" for bound in (min(numbers), max(numbers))) if numbers else ("", "")
        label = f"{low} to {high} {unit}" if low != high else f"{low} {unit}" if numbers else without
        members = [tasks[index] for index in indices]
        bin_settled, bin_admitted = sum(task.settled for task in members), sum(task.admitted for task in members)
        result.append(
            BinShare(
                label=label,
                tasks=len(members),
                settled=bin_settled,
                admitted=bin_admitted,
                of_settled=bin_settled / settled,
                of_admitted=bin_admitted / admitted,
            )
        )
    return result
