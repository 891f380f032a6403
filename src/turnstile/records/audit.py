"""The audit of a run's ledger, which finds attempts that were lost and attempts that were trained on too often."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnstile.records.balance import BinShare, StepBalance, TaskBalance, bin_shares, step_balances, task_balances
from turnstile.records.ledger import OPEN, State, open_ledger
from turnstile.records.record import read_record

MAX_NAMED = 5
"""Number of findings that are listed individually."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The limits that the recipe sets for every step."""

    attempts: int  # attempts issued per step: groups times group size
    passes: int  # passes in which an attempt may be trained on: epochs * (1 + uses from the replay buffer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """The result of an audit. `lost` and `overused` hold one line per finding; a correct run has none."""

    committed: int | None  # the step of the last checkpoint that counts
    states: Mapping[State, int]
    why: Mapping[State, Sequence[tuple[str, int]]]  # why attempts were left out, the most frequent first
    uses: int
    lost_count: int
    overused_count: int
    lost: Sequence[str]
    overused: Sequence[str]
    tasks: Sequence[TaskBalance]
    steps: Sequence[StepBalance]
    by_length: Sequence[BinShare]
    by_difficulty: Sequence[BinShare]

    @property
    def issued(self) -> int:
        """Number of all attempts."""
        return sum(self.states.values())

    @property
    def open(self) -> int:
        """Number of attempts that belong to unfinished steps."""
        return sum(task.open for task in self.tasks)

    @property
    def balanced(self) -> bool:
        """Whether there are no findings."""
        return not self.lost_count and not self.overused_count


def audit(run: Path, expected: Expected, *, record: bool = False) -> Audit:
    """Audit the ledger of a run. With `record`, also compare it with the entire record, which takes longer.

    Raises LedgerError if there is no ledger or if it is damaged.
    """
    db = open_ledger(run)
    try:
        committed = db.execute("SELECT MAX(step) FROM checkpoints").fetchone()[0]
        states = {State(name): count for name, count in db.execute("SELECT state, COUNT(*) FROM attempts GROUP BY 1")}
        lost_count, lost = _summarize(_find_lost(db, committed, expected))
        if record and committed is not None:
            count, lines = _find_unrecorded(db, run, committed)
            lost_count, lost = lost_count + count, [*lost, *lines]
        overused_count, overused = _summarize(_find_overused(db, expected))
        tasks = task_balances(db)
        return Audit(
            committed=committed,
            states=states,
            why={
                state: _reasons(db, state)
                for state in (State.GATED_OUT, State.GIVEN_UP, State.ENV_ERROR)
                if state in states
            },
            uses=db.execute("SELECT COUNT(*) FROM uses").fetchone()[0],
            lost_count=lost_count,
            overused_count=overused_count,
            lost=lost,
            overused=overused,
            tasks=tasks,
            steps=step_balances(db),
            by_length=bin_shares(tasks, [task.turns for task in tasks], "turns", "never played to an end"),
            by_difficulty=bin_shares(tasks, [task.outcome for task in tasks], "mean outcome", "no verdict"),
        )
    finally:
        db.close()


_NAME = "a.\"group\" || ', attempt ' || a.number"
Finding = tuple[int, str]


def _find_lost(db: sqlite3.Connection, committed: int | None, expected: Expected) -> Iterable[Finding]:
    """Yield findings about attempts that are unaccounted for, although the checkpoint of step `committed` counts."""
    if committed is None:
        return
    places = ", ".join("?" * len(OPEN))
    for name, state in db.execute(
        f"SELECT {_NAME}, state FROM attempts a WHERE step <= ? AND state IN ({places}) ORDER BY id", (committed, *OPEN)
    ):
        yield 1, f"{name} is still {state}"
    issued = dict(db.execute("SELECT step, COUNT(*) FROM attempts WHERE step <= ? GROUP BY 1", (committed,)))
    for step in range(1, committed + 1):
        if missing := expected.attempts - issued.get(step, 0):
            yield (
                abs(missing),
                f"step {step} issued {issued.get(step, 0)} attempts, the recipe says {expected.attempts}",
            )
    for (name,) in db.execute(
        f"SELECT {_NAME} FROM attempts a WHERE state = ? AND NOT EXISTS (SELECT 1 FROM uses WHERE attempt = a.id)",
        (State.ADMITTED,),
    ):
        yield 1, f"{name} is admitted, but nothing was trained on it"


def _find_overused(db: sqlite3.Connection, expected: Expected) -> Iterable[Finding]:
    """Yield attempts trained on more often than the recipe allows, or without having been admitted."""
    for name, count in db.execute(
        f"SELECT {_NAME}, u.uses FROM (SELECT attempt, COUNT(*) uses FROM uses GROUP BY 1 HAVING uses > ?) u "
        "JOIN attempts a ON a.id = u.attempt ORDER BY a.id",
        (expected.passes,),
    ):
        yield 1, f"{name} was trained on {count} times, the recipe says {expected.passes}"
    for name, state in db.execute(
        f"SELECT DISTINCT {_NAME}, state FROM uses u JOIN attempts a ON a.id = u.attempt WHERE state != ?",
        (State.ADMITTED,),
    ):
        yield 1, f"{name} is {state}, but was trained on"


def _find_unrecorded(db: sqlite3.Connection, run: Path, committed: int) -> tuple[int, list[str]]:
    """Return the findings where ledger and record disagree about an attempt's tokens, or one of them lacks the attempt.

    The result is the number of such attempts, and one line for each of the first few.
    """
    in_ledger = {
        (group, number): tokens
        for group, number, tokens in db.execute(
            'SELECT "group", number, tokens FROM attempts WHERE settled <= ?', (committed,)
        )
    }
    in_record = {
        trajectory.key: sum(len(turn.completion.token_ids) for turn in trajectory.turns)
        for entry in read_record(run, phase="train")
        if entry.step <= committed
        for trajectory in entry.group.trajectories
    }
    wrong = [key for key in in_ledger.keys() | in_record.keys() if in_ledger.get(key) != in_record.get(key)]
    return _summarize(
        (
            1,
            f"{key[0]}, attempt {key[1]}: tokens in the ledger {in_ledger.get(key, 'none')}, "
            f"in the record {in_record.get(key, 'none')}",
        )
        for key in sorted(wrong)
    )


def _summarize(findings: Iterable[Finding]) -> tuple[int, list[str]]:
    """Return the total number of findings, and the lines of the first ones."""
    everything = list(findings)
    lines = [line for _, line in everything[:MAX_NAMED]]
    if len(everything) > MAX_NAMED:
        lines.append(f"and {len(everything) - MAX_NAMED} more")
    return sum(count for count, _ in everything), lines


def _reasons(db: sqlite3.Connection, state: State) -> list[tuple[str, int]]:
    """Return the reasons for a state with their counts, the most frequent first. Errors are counted by type."""
    counts: dict[str, int] = {}
    for why, count in db.execute("SELECT why, COUNT(*) FROM attempts WHERE state = ? GROUP BY 1", (state,)):
        reason = why if state is State.GATED_OUT else why.partition(":")[0]
        counts[reason] = counts.get(reason, 0) + count
    return sorted(counts.items(), key=lambda item: -item[1])
