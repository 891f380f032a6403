"""What became of a ledger's attempts by step and by task, and which tasks are trained on less than they are played."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstile.records.ledger import State

BINS = 4
"""Into which tasks are parted by length and by difficulty, as equal as ties allow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """What became of some of the attempts."""

    issued: int
    admitted: int
    gated_out: int
    given_up: int
    finished: int  # and waiting for their step to be trained

    @property
    def settled(self) -> int:
        """Those whose step is done."""
        return self.admitted + self.gated_out + self.given_up

    @property
    def open(self) -> int:
        """Those that are to be played, are being played or wait for their step; or are lost."""
        return self.issued - self.settled


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskBalance(Balance):
    """Of the attempts at one task. `turns` and `outcome` are means over those that are settled, None where none of them
    was played to an end."""

    task: str
    turns: float | None
    outcome: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBalance(Balance):
    """Of the attempts that were issued for one step."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BinShare:
    """Tasks that are alike in length or difficulty: of all settled attempts and of those trained on, how many are at
    them. What is played ahead and not trained yet counts in neither."""

    label: str
    tasks: int
    settled: int
    admitted: int
    of_settled: float
    of_admitted: float


_COUNTED = (State.ADMITTED, State.GATED_OUT, State.GIVEN_UP, State.FINISHED)
_COUNTS = ", ".join(["COUNT(*)", *("SUM(state = ?)" for _ in _COUNTED)])
"""The fields of a `Balance`, in their order."""


def task_balances(db: sqlite3.Connection) -> list[TaskBalance]:
    """In the order of their names."""
    played = (State.ADMITTED, State.GATED_OUT)
    rows = db.execute(
        f"SELECT {_COUNTS}, task, AVG(CASE WHEN state IN (?, ?) THEN turns END), AVG(outcome) "
        "FROM attempts GROUP BY task ORDER BY task",
        (*_COUNTED, *played),
    )
    return [TaskBalance(**_balance(row), task=row[-3], turns=row[-2], outcome=row[-1]) for row in rows]


def step_balances(db: sqlite3.Connection) -> list[StepBalance]:
    """Return the balance of each step, oldest first."""
    rows = db.execute(f"SELECT {_COUNTS}, step FROM attempts GROUP BY step ORDER BY step", _COUNTED)
    return [StepBalance(**_balance(row), step=row[-1]) for row in rows]


def _balance(row: Sequence[Any]) -> dict[str, int]:
    names = ("issued", "admitted", "gated_out", "given_up", "finished")
    return dict(zip(names, row, strict=False))


def bin_shares(tasks: Sequence[TaskBalance], values: Sequence[float | None], unit: str, without: str) -> list[BinShare]:
    """Tasks parted by a value of theirs, equal values together; at the end those that have none. A task of which
    nothing is settled is in none."""
    known = np.array([value for value in values if value is not None], np.float64)
    ordered: NDArray[np.float64] = np.sort(known)
    parts: dict[int, list[int]] = {}
    for place, (task, value) in enumerate(zip(tasks, values, strict=True)):
        if task.settled:
            part = BINS if value is None else int(BINS * np.searchsorted(ordered, value) / len(ordered))
            parts.setdefault(part, []).append(place)
    settled = max(1, sum(task.settled for task in tasks))
    admitted = max(1, sum(task.admitted for task in tasks))
    found = []
    for _, places in sorted(parts.items()):
        numbers = [value for place in places if (value := values[place]) is not None]
        low, high = (f"{bound:.4g}" for bound in (min(numbers), max(numbers))) if numbers else ("", "")
        label = f"{low} to {high} {unit}" if low != high else f"{low} {unit}" if numbers else without
        own = [tasks[place] for place in places]
        own_settled, own_admitted = sum(task.settled for task in own), sum(task.admitted for task in own)
        found.append(
            BinShare(
                label=label,
                tasks=len(own),
                settled=own_settled,
                admitted=own_admitted,
                of_settled=own_settled / settled,
                of_admitted=own_admitted / admitted,
            )
        )
    return found
