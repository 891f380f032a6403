from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from booked import booked_run
from turnstile.config import make_recipe
from turnstile.rollout.episode import Attempt
from turnstile.rollout.run_records import RunRecords
from turnstile.runs.run_folder import open_run
from turnstile.tracking.jsonl import JsonlTracker
from turnstile.types import Task

Cli = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of a recipe that says what they were."""
    return made(tmp_path / "run")


def made(folder: Path, **train: Any) -> Path:
    said = {"rollout": {"tasks_per_step": 2, "group_size": 2}, "train": {"steps": 3, "epochs": 2, **train}}
    open_run(folder, make_recipe(said), fresh=False)
    return booked_run(folder)


def test_a_run_that_balances(cli: Cli, run: Path) -> None:
    done = cli("audit", str(run), "--record")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == f"{run}: step 2 of 3 stands; 8 attempts issued, 8 uses in training"
    assert "admitted          4" in done.out
    assert "gated_out         4  its group's advantages are all zero 4" in done.out
    assert [line.split() for line in lines if line.startswith(("t0", "t1"))] == [
        ["t1", "4", "0", "4", "0", "0", "0"],
        ["t0", "4", "4", "0", "0", "0", "0"],
    ]
    assert [line.split() for line in lines if line.startswith(("1 ", "2 "))][:2] == [
        ["1", "4", "2", "2", "0", "0", "0", "-", "-"],
        ["2", "4", "2", "2", "0", "0", "0", "-", "-"],
    ]
    assert ["4", "turns", "1", "4", "0", "50.0", "%", "0.0", "%", "0.00"] in [line.split() for line in lines]
    assert lines[-2:] == ["lost: 0", "used more often than declared: 0"]


def test_how_old_the_tokens_of_each_step_were(cli: Cli, run: Path) -> None:
    tracker = JsonlTracker(run)
    for step in (1, 2):
        tracker.log(step, {"staleness/mean": 0.25 * step, "staleness/max": step})
    tracker.close()
    done = cli("audit", str(run))
    assert [line.split()[-2:] for line in done.out.splitlines() if line.startswith(("1 ", "2 "))][:2] == [
        ["0.25", "1"],
        ["0.50", "2"],
    ]


def test_what_is_played_ahead_is_told_apart(cli: Cli, run: Path) -> None:
    records = RunRecords(run)
    records.callback(3).on_issue([(Task(id="t0", env="e"), Attempt(group="train/3/0/t0", number=0, seed=0))])
    records.close()
    done = cli("audit", str(run))
    assert done.code == 0
    assert "attempts of steps that are not done yet, which are in none of the shares below: 1" in done.out
    assert ["3", "1", "0", "0", "0", "1", "0", "-", "-"] in [line.split() for line in done.out.splitlines()]


def test_a_run_that_does_not(cli: Cli, run: Path) -> None:
    with sqlite3.connect(run / "ledger.db") as db:
        db.execute("UPDATE attempts SET state = 'running' WHERE id = 3")
        db.execute("INSERT INTO uses VALUES (1, 2, 0)")
    db.close()
    done = cli("audit", str(run))
    assert done.code == 1
    assert done.out.splitlines()[-4:] == [
        "lost: 1",
        "  train/1/1/t1, attempt 0 is still running",
        "used more often than declared: 1",
        "  train/1/0/t0, attempt 0 was trained on 3 times, the recipe says 2",
    ]


def test_two_runs(cli: Cli, run: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other", lr=1e-3)
    done = cli("audit", "--diff", str(run), str(other))
    assert (done.code, done.out.splitlines()) == (
        0,
        ["recipe: train.lr differ", "equal up to step 2, the last that both have"],
    )
    (other / "record" / "000001-train.jsonl.gz").unlink()
    done = cli("audit", "--diff", str(run), str(other))
    assert (done.code, done.out.splitlines()[-1]) == (1, "everything before step 1 is equal")


def test_what_is_asked_of_it(cli: Cli, run: Path, tmp_path: Path) -> None:
    for arguments in (["--diff", str(run)], [str(run), str(run)]):
        done = cli("audit", *arguments)
        assert (done.code, "--diff compares two runs" in done.error) == (2, True)
    (run / "ledger.db").unlink()
    done = cli("audit", str(run))
    assert (done.code, "has no ledger.db" in done.error) == (1, True)
