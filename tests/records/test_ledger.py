"""The ledger: states of attempts, uses, and undoing what followed the last checkpoint."""

from __future__ import annotations

import resource
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from made_groups import attempt
from turnstile.errors import LedgerError
from turnstile.records.journal import Key
from turnstile.records.ledger import FILE, Disposition, Ledger, State, open_ledger
from turnstile.types import Stop, Trajectory

GROUP = "train/1/0/t"


def trajectory(group: str, number: int, *, error: str | None = None) -> Trajectory:
    played = attempt(number, [3, 2], group=group)
    return played if error is None else replace(played, stop=Stop.ERROR, error=error)


def keys(step: int, attempts: int = 2) -> list[Key]:
    return [(f"train/{step}/0/t", number) for number in range(attempts)]


def states(run: Path) -> dict[Key, str]:
    db = open_ledger(run)
    rows = db.execute('SELECT "group", number, state FROM attempts ORDER BY id').fetchall()
    db.close()
    return {(group, number): state for group, number, state in rows}


def uses(run: Path) -> list[tuple[str, int, int]]:
    db = open_ledger(run)
    rows = db.execute(
        'SELECT "group", number, uses.step FROM uses JOIN attempts ON attempts.id = attempt ORDER BY uses.rowid'
    ).fetchall()
    db.close()
    return rows


def play(ledger: Ledger, step: int) -> None:
    """Record both attempts of a step as played and trained on in one pass."""
    ledger.issue(step, [(key, "t") for key in keys(step)], {})
    for key in keys(step):
        ledger.begin(key)
        ledger.end(trajectory(*key), will_retry=False)
    ledger.finalize(step, [Disposition(key=key, state=State.ADMITTED, outcome=1.0) for key in keys(step)], [keys(step)])


def test_from_issued_to_admitted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.issue(1, [(key, "t") for key in keys(1, 4)], {})
    seen = [set(states(tmp_path).values())]
    for number in range(4):
        ledger.begin((GROUP, number))
    seen.append(set(states(tmp_path).values()))
    ledger.end(trajectory(GROUP, 0, error="SandboxError: gone"), will_retry=True)
    seen.append({states(tmp_path)[GROUP, 0]})
    ledger.begin((GROUP, 0))
    ledger.end(trajectory(GROUP, 0, error="SandboxError: gone"), will_retry=False)
    for number in (1, 2, 3):
        ledger.end(trajectory(GROUP, number), will_retry=False)
    seen.append(set(states(tmp_path).values()))
    fates = [
        Disposition(key=(GROUP, 0), state=State.GIVEN_UP, why="SandboxError: gone"),
        Disposition(key=(GROUP, 1), state=State.ADMITTED, outcome=1.0),
        Disposition(key=(GROUP, 2), state=State.GATED_OUT, why="its end: timeout", outcome=0.0),
        Disposition(key=(GROUP, 3), state=State.GATED_OUT, why="nothing in it to train"),
    ]
    ledger.finalize(1, fates, [[(GROUP, 1)], [(GROUP, 1)]])
    assert seen == [{"issued"}, {"running"}, {"env_error"}, {"given_up", "finished"}]
    assert list(states(tmp_path).values()) == ["given_up", "admitted", "gated_out", "gated_out"]
    assert uses(tmp_path) == [(GROUP, 1, 1)] * 2
    ledger.close()


def test_resume_undoes_what_followed_the_checkpoint(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for step in (1, 2):
        play(ledger, step)
        ledger.commit(step, f"digest {step}")
    ledger.issue(3, [(key, "t") for key in keys(3)], {})
    ledger.begin(keys(3)[0])
    assert ledger.committed() == {1: "digest 1", 2: "digest 2"}
    ledger.resume_at(1)
    assert ledger.committed() == {1: "digest 1"}
    assert list(states(tmp_path).values()) == [*["admitted"] * 2, *["finished"] * 2, *["issued"] * 2]
    assert {step for _, _, step in uses(tmp_path)} == {1}
    finished = {key: trajectory(*key) for key in keys(2)[:1]}
    ledger.issue(2, [(key, "t") for key in keys(2)], finished)  # what the journal does not hold is played again
    assert list(states(tmp_path).values())[2:4] == ["finished", "issued"]
    ledger.close()


def test_resume_issues_given_up_attempts_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for step in (1, 2):
        ledger.issue(step, [(keys(step)[0], "t")], {})
        ledger.end(trajectory(*keys(step)[0], error="EngineError: gone"), will_retry=False)
    ledger.finalize(1, [Disposition(key=keys(1)[0], state=State.GIVEN_UP)], [])
    ledger.resume_at(1)
    assert list(states(tmp_path).values()) == ["given_up", "issued"]
    ledger.close()


BOOK = """
import os, signal, sys
from pathlib import Path
from turnstile.records.ledger import Disposition, Ledger, State
ledger = Ledger(Path(sys.argv[1]))
keys = [("g", number) for number in range(1000)]
ledger.issue(1, [(key, "t") for key in keys], {})
ledger.finalize(1, [Disposition(key=key, state=State.ADMITTED) for key in keys], [keys])
statements = 0
def count(statement):
    global statements
    statements += 1
    if statements == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
ledger._db.set_trace_callback(count)
ledger.finalize(2, [Disposition(key=key, state=State.GATED_OUT) for key in keys], [keys])
ledger.commit(2, "digest")
"""


@pytest.mark.parametrize("statement", [1, 700, 2001, 2002, 2003, 2004])
def test_kill_in_a_transaction_undoes_it(tmp_path: Path, statement: int) -> None:
    """1,000 states, 1,000 uses and COMMIT are one transaction; the checkpoint is the next."""
    done = subprocess.run([sys.executable, "-c", BOOK, str(tmp_path), str(statement)], check=False)
    assert done.returncode == -signal.SIGKILL
    settled = statement > 2002  # BEGIN is the first
    assert set(states(tmp_path).values()) == {"gated_out" if settled else "admitted"}
    assert len(uses(tmp_path)) == (2000 if settled else 1000)
    ledger = Ledger(tmp_path)
    assert ledger.committed() == {}
    ledger.close()


def test_full_disk_is_reported_and_loses_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    play(ledger, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises((OSError, LedgerError)):
            ledger.issue(2, [(("g", number), "t" * 100) for number in range(5000)], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(states(tmp_path)) == 2
    play(ledger, 2)
    assert len(states(tmp_path)) == 4
    ledger.close()


def test_refuses_a_file_that_is_not_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"has no ledger\.db; give the folder of a run"):
        open_ledger(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    for opens in (Ledger, open_ledger):
        with pytest.raises(LedgerError, match=r"ledger\.db: file is not a database"):
            opens(tmp_path)
    (tmp_path / FILE).unlink()
    Ledger(tmp_path).close()
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("PRAGMA user_version = 9")
    db.close()
    for opens in (Ledger, open_ledger):
        with pytest.raises(LedgerError, match="has version 9, this Turnstile writes 1"):
            opens(tmp_path)
