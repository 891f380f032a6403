"""Audits of runs that balance and of runs that do not; tasks trained on less than played."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from booked import booked_run
from made_groups import attempt
from turnstile.records.audit import Expected, audit
from turnstile.records.ledger import FILE, State
from turnstile.rollout.episode import Attempt
from turnstile.rollout.run_records import RunRecords
from turnstile.types import Task

DECLARED = Expected(attempts=4, passes=2)


def change(run: Path, statement: str, *values: Any) -> None:
    with sqlite3.connect(run / FILE) as db:
        db.execute(statement, values)
    db.close()


def test_a_run_that_balances(tmp_path: Path) -> None:
    found = audit(booked_run(tmp_path), DECLARED, record=True)
    assert found.balanced
    assert (found.committed, found.issued, found.uses) == (2, 8, 8)
    assert found.states == {State.ADMITTED: 4, State.GATED_OUT: 4}
    assert found.why == {State.GATED_OUT: [("its group's advantages are all zero", 4)]}
    assert (found.lost, found.overused) == ([], [])
    assert [(t.task, t.issued, t.admitted, t.gated_out, t.open) for t in found.tasks] == [
        ("t0", 4, 4, 0, 0),
        ("t1", 4, 0, 4, 0),
    ]


def test_shares_of_tasks_trained_on_less_than_played(tmp_path: Path) -> None:
    found = audit(booked_run(tmp_path), DECLARED)
    assert [(s.label, s.tasks, s.settled, s.admitted, s.of_settled, s.of_admitted) for s in found.by_length] == [
        ("1 turns", 1, 4, 4, 0.5, 1.0),
        ("4 turns", 1, 4, 0, 0.5, 0.0),
    ]
    assert [(s.label, s.of_admitted) for s in found.by_difficulty] == [("0 mean outcome", 0.0), ("1 mean outcome", 1.0)]


@pytest.mark.parametrize(
    ("statement", "lost", "overused", "line"),
    [
        ("UPDATE attempts SET state = 'running' WHERE id = 3", 1, 0, "train/1/1/t1, attempt 0 is still running"),
        ("UPDATE attempts SET state = 'finished' WHERE id = 4", 1, 0, "train/1/1/t1, attempt 1 is still finished"),
        ("DELETE FROM attempts WHERE id = 3", 1, 0, "step 1 issued 3 attempts, the recipe says 4"),
        ("DELETE FROM uses WHERE attempt = 5", 1, 0, "train/2/0/t0, attempt 0 is admitted, but nothing was trained"),
        (
            "INSERT INTO uses VALUES (1, 2, 0)",
            0,
            1,
            "train/1/0/t0, attempt 0 was trained on 3 times, the recipe says 2",
        ),
        ("INSERT INTO uses VALUES (3, 1, 0)", 0, 1, "train/1/1/t1, attempt 0 is gated_out, but was trained on"),
    ],
)
def test_finds_what_does_not_balance(tmp_path: Path, statement: str, lost: int, overused: int, line: str) -> None:
    run = booked_run(tmp_path)
    change(run, statement)
    found = audit(run, DECLARED)
    assert not found.balanced
    assert (found.lost_count, found.overused_count) == (lost, overused)
    (said,) = [*found.lost, *found.overused]
    assert said.startswith(line)


def test_unfinished_attempts_are_not_lost(tmp_path: Path) -> None:
    run = booked_run(tmp_path)
    change(run, "DELETE FROM checkpoints WHERE step = 2")
    change(run, "UPDATE attempts SET state = 'running' WHERE step = 2")
    change(run, "DELETE FROM uses WHERE step = 2")
    found = audit(run, DECLARED)
    assert found.balanced
    assert [task.open for task in found.tasks] == [2, 2]


def test_attempts_played_ahead_are_in_no_share(tmp_path: Path) -> None:
    """Otherwise a task that is being played, and was never trained on, would look left out."""
    run = booked_run(tmp_path)
    before = audit(run, DECLARED)
    records = RunRecords(run)
    jobs = [(Task(id=f"t{i}", env="e"), Attempt(group=f"train/3/{i}/t{i}", number=0, seed=0)) for i in (1, 2)]
    callback = records.callback(3)
    callback.on_issue(jobs)
    for _, of in jobs:
        callback.on_start(of)
    callback.on_end(attempt(0, [2] * 9, group="train/3/1/t1"), will_retry=False)
    records.close()
    found = audit(run, DECLARED)
    assert found.balanced
    assert (found.issued, found.open) == (10, 2)
    assert (found.by_length, found.by_difficulty) == (before.by_length, before.by_difficulty)
    assert [(s.step, s.issued, s.admitted, s.gated_out, s.open, s.finished) for s in found.steps] == [
        (1, 4, 2, 2, 0, 0),
        (2, 4, 2, 2, 0, 0),
        (3, 2, 0, 0, 2, 1),
    ]
    assert [(t.task, t.open, t.finished, t.turns) for t in found.tasks] == [
        ("t0", 0, 0, 1.0),
        ("t1", 1, 1, 4.0),
        ("t2", 1, 0, None),
    ]


def test_finds_a_record_that_differs_from_the_ledger(tmp_path: Path) -> None:
    run = booked_run(tmp_path)
    (run / "record" / "000001-train.jsonl.gz").unlink()
    assert audit(run, DECLARED).balanced
    found = audit(run, DECLARED, record=True)
    assert found.lost_count == 4
    assert found.lost[0] == "train/1/0/t0, attempt 0: tokens in the ledger 2, in the record none"


def test_names_only_the_first_findings(tmp_path: Path) -> None:
    run = booked_run(tmp_path, steps=3)
    change(run, "UPDATE attempts SET state = 'issued' WHERE state = 'gated_out'")
    found = audit(run, DECLARED)
    assert (found.lost_count, len(found.lost), found.lost[-1]) == (6, 6, "and 1 more")
