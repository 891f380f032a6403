"""The ledger, which holds the state of every attempt of a run and each use of it in training.

`RUN/ledger.db` is an SQLite database in WAL mode with one row for each attempt, one for each use of an attempt in a
pass over a training step, and one for each checkpoint that counts. A checkpoint counts once its row is written. When a
run resumes, everything after the last intact checkpoint is undone. No value in it depends on a clock.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from turnstile.errors import LedgerError
from turnstile.records.journal import Key
from turnstile.types import Stop, Trajectory

FILE = "ledger.db"
VERSION = 1


class State(StrEnum):
    """The state of an attempt."""

    ISSUED = "issued"  # to be played
    RUNNING = "running"
    ENV_ERROR = "env_error"  # infrastructure failed; the attempt is played again
    GIVEN_UP = "given_up"  # infrastructure failed, and no retries were left
    FINISHED = "finished"  # played, but its step not trained yet
    ADMITTED = "admitted"  # trained on
    GATED_OUT = "gated_out"  # left out of training, for the reason in `why`


OPEN = (State.ISSUED, State.RUNNING, State.ENV_ERROR, State.FINISHED)
"""States that no attempt may have once its step is committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disposition:
    """The final state of an attempt in its step (admitted, given up or gated out), and the reason."""

    key: Key
    state: State
    why: str = ""
    outcome: float | None = None  # None if there was no verdict


_SCHEMA = """
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY,
    "group" TEXT NOT NULL,
    number INTEGER NOT NULL,
    task TEXT NOT NULL,
    step INTEGER NOT NULL,              -- for which it was issued
    state TEXT NOT NULL,
    why TEXT NOT NULL DEFAULT '',       -- it was gated out, given up or failed
    begun INTEGER NOT NULL DEFAULT 0,   -- how often
    turns INTEGER,                      -- of the last time it was played
    tokens INTEGER,                     -- that were sampled then
    outcome REAL,
    settled INTEGER,                    -- the step that admitted it or did not
    UNIQUE ("group", number)
);
CREATE TABLE uses (
    attempt INTEGER NOT NULL REFERENCES attempts (id),
    step INTEGER NOT NULL,
    pass INTEGER NOT NULL               -- over the rows of that step, from 0
);
CREATE INDEX uses_of ON uses (attempt);
CREATE INDEX uses_in ON uses (step);
CREATE INDEX attempts_of ON attempts (step);
CREATE TABLE checkpoints (
    step INTEGER PRIMARY KEY,
    digest TEXT NOT NULL                -- of the list of its files
);
"""


class Ledger:
    """Opens or creates the ledger of a run. Raises LedgerError for a file that is not a ledger.

    Changes survive the death of the process once a call returns, and a crash of the machine once `commit` returns.
    Several threads may use it.
    """

    def __init__(self, run: Path) -> None:
        self._path = Path(run) / FILE
        self._lock = threading.RLock()
        with _translate_errors(self._path):
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=30, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            _check(self._db, self._path)

    def issue(self, step: int, attempts: Iterable[tuple[Key, str]], finished: Mapping[Key, Trajectory]) -> None:
        """Record the attempts that a step needs, each with its task's id, and the results of those in `finished`."""
        rows = list(attempts)
        with self._transaction():
            self._db.executemany(
                'INSERT INTO attempts ("group", number, task, step, state) VALUES (?, ?, ?, ?, ?) '
                'ON CONFLICT ("group", number) DO UPDATE SET state = excluded.state',
                [(*key, task, step, State.ISSUED) for key, task in rows],
            )
            for key, _ in rows:
                if key in finished:
                    self._record_played(finished[key], State.FINISHED, "")

    def begin(self, key: Key) -> None:
        """Record that an attempt has started, or started again from the beginning."""
        with self._transaction():
            self._db.execute(f"UPDATE attempts SET state = ?, begun = begun + 1 WHERE {_KEY}", (State.RUNNING, *key))

    def end(self, trajectory: Trajectory, *, will_retry: bool) -> None:
        """Record an attempt's end. `will_retry` is true if infrastructure failed and the attempt is played again."""
        state = State.FINISHED
        if trajectory.stop is Stop.ERROR:
            state = State.ENV_ERROR if will_retry else State.GIVEN_UP
        with self._transaction():
            self._record_played(trajectory, state, trajectory.error or "")

    def finalize(self, step: int, dispositions: Iterable[Disposition], passes: Iterable[Iterable[Key]]) -> None:
        """Record the final states of a step's attempts, and the attempts trained on in each pass over its rows."""
        with self._transaction():
            self._db.executemany(
                f"UPDATE attempts SET state = ?, why = ?, outcome = ?, settled = ? WHERE {_KEY}",
                [(each.state, each.why, each.outcome, step, *each.key) for each in dispositions],
            )
            for number, keys in enumerate(passes):
                self._db.executemany(
                    f"INSERT INTO uses (attempt, step, pass) SELECT id, ?, ? FROM attempts WHERE {_KEY}",
                    [(step, number, *key) for key in keys],
                )

    def commit(self, step: int, digest: str) -> None:
        """Commit the checkpoint of `step` and everything recorded before it.

        `digest` is the digest of the checkpoint's list of files. This single write is the commit point of a step: a
        crash before it undoes the step, and a crash after it does not.
        """
        with self._lock:
            # FULL only for this transaction: its fsync covers all earlier ones, which need none of their own.
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                self._db.execute("INSERT OR REPLACE INTO checkpoints (step, digest) VALUES (?, ?)", (step, digest))
            self._db.execute("PRAGMA synchronous = NORMAL")

    def committed(self) -> dict[int, str]:
        """Return the digests of the checkpoints that count, by step."""
        with self._lock:
            return dict(self._db.execute("SELECT step, digest FROM checkpoints ORDER BY step").fetchall())

    def resume_at(self, step: int) -> None:
        """Undo everything after the checkpoint of `step`.

        Attempts that were finished are kept to be trained on again; all others are to be played again.
        """
        with self._transaction():
            self._db.execute("DELETE FROM checkpoints WHERE step > ?", (step,))
            self._db.execute("DELETE FROM uses WHERE step > ?", (step,))
            self._db.execute(
                "UPDATE attempts SET state = ?, why = '', outcome = NULL, settled = NULL "
                "WHERE settled > ? AND state IN (?, ?)",
                (State.FINISHED, step, State.ADMITTED, State.GATED_OUT),
            )
            self._db.execute(
                "UPDATE attempts SET state = ?, settled = NULL "
                "WHERE state IN (?, ?) OR (state = ? AND (settled IS NULL OR settled > ?))",
                (State.ISSUED, State.RUNNING, State.ENV_ERROR, State.GIVEN_UP, step),
            )

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    def _record_played(self, trajectory: Trajectory, state: State, why: str) -> None:
        tokens = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
        self._db.execute(
            f"UPDATE attempts SET state = ?, why = ?, turns = ?, tokens = ? WHERE {_KEY}",
            (state, why, len(trajectory.turns), tokens, *trajectory.key),
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run the body as one transaction, which takes effect completely or not at all."""
        with self._lock, _translate_errors(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:  # commits, or rolls back
                yield


_KEY = '"group" = ? AND number = ?'


def open_ledger(run: Path) -> sqlite3.Connection:
    """Open the ledger of a run for reading. Raises LedgerError if there is none or if it is damaged."""
    path = Path(run) / FILE
    if not path.is_file():
        raise LedgerError(f"run {str(run)!r} has no {FILE}; give the folder of a run that was trained, like runs/NAME")
    with _translate_errors(path):
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)
        _check(db, path)
        result = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if result != "ok":
        raise LedgerError(f"{path} is damaged: {result}")
    return db


def _check(db: sqlite3.Connection, path: Path) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != VERSION:
        raise LedgerError(f"{path} has version {version}, this Turnstile writes {VERSION}; use the one that wrote it")


@contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Convert SQLite's errors to LedgerErrors that name the file, and a full disk to OSError."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise LedgerError(f"{path}: {error}") from error
