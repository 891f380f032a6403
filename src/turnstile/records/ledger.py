"""The ledger: what became of every attempt of a run, and how often each was trained on.

`RUN/ledger.db` is an SQLite database in WAL mode with one row for each attempt, one for each use of an attempt in a
pass over a training step, and one for each checkpoint that counts. A checkpoint counts once its row is written; what
was booked after the last one that still stands is taken back when the run goes on. No clock decides anything here.
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
    """Where an attempt stands."""

    ISSUED = "issued"  # to be played
    RUNNING = "running"
    ENV_ERROR = "env_error"  # infrastructure failed; it is played again
    GIVEN_UP = "given_up"  # infrastructure failed, and no retries were left
    FINISHED = "finished"  # played, and waits for its step to be trained
    ADMITTED = "admitted"  # trained on
    GATED_OUT = "gated_out"  # kept out of training, for the reason beside it


OPEN = (State.ISSUED, State.RUNNING, State.ENV_ERROR, State.FINISHED)
"""States that an attempt must have left when its step stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disposition:
    """What a step made of an attempt that was played: admitted, given up or gated out, and why."""

    key: Key
    state: State
    why: str = ""
    outcome: float | None = None  # None without a verdict


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
    """Opens the ledger of a run, or begins it. Raises LedgerError for a file that is no such thing.

    A call has happened when it returns, also for a process that is killed then; `commit` also for a machine that stops.
    Several threads may call.
    """

    def __init__(self, run: Path) -> None:
        self._path = Path(run) / FILE
        self._lock = threading.RLock()
        with _translated_errors(self._path):
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=30, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            _check(self._db, self._path)

    def issue(self, step: int, attempts: Iterable[tuple[Key, str]], finished: Mapping[Key, Trajectory]) -> None:
        """Books the attempts (with their tasks) that a step needs; of those that are `finished`, what they came to."""
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
        """An attempt is played from its start."""
        with self._transaction():
            self._db.execute(f"UPDATE attempts SET state = ?, begun = begun + 1 WHERE {_KEY}", (State.RUNNING, *key))

    def end(self, trajectory: Trajectory, *, will_retry: bool) -> None:
        """An attempt came to an end; `again` says that it is played once more, since infrastructure failed."""
        state = State.FINISHED
        if trajectory.stop is Stop.ERROR:
            state = State.ENV_ERROR if will_retry else State.GIVEN_UP
        with self._transaction():
            self._record_played(trajectory, state, trajectory.error or "")

    def finalize(self, step: int, dispositions: Iterable[Disposition], passes: Iterable[Iterable[Key]]) -> None:
        """Books what a step made of its attempts, and which were trained on in each pass over its rows."""
        with self._transaction():
            self._db.executemany(
                f"UPDATE attempts SET state = ?, why = ?, outcome = ?, settled = ? WHERE {_KEY}",
                [
                    (disposition.state, disposition.why, disposition.outcome, step, *disposition.key)
                    for disposition in dispositions
                ],
            )
            for number, keys in enumerate(passes):
                self._db.executemany(
                    f"INSERT INTO uses (attempt, step, pass) SELECT id, ?, ? FROM attempts WHERE {_KEY}",
                    [(step, number, *key) for key in keys],
                )

    def commit(self, step: int, digest: str) -> None:
        """The commit point: from now on the checkpoint of `step`, whose list of files has that digest, stands, and with
        it everything booked up to it."""
        with self._lock:
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                self._db.execute("INSERT OR REPLACE INTO checkpoints (step, digest) VALUES (?, ?)", (step, digest))
            self._db.execute("PRAGMA synchronous = NORMAL")

    def committed(self) -> dict[int, str]:
        """The checkpoints that count: step -> digest."""
        with self._lock:
            return dict(self._db.execute("SELECT step, digest FROM checkpoints ORDER BY step").fetchall())

    def resume_at(self, step: int) -> None:
        """Takes back what was booked after the checkpoint of `step`: what was finished waits to be trained on again,
        and everything else to be played."""
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
        """One transaction, whole or not at all."""
        with self._lock, _translated_errors(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:  # commits, or takes everything back
                yield


_KEY = '"group" = ? AND number = ?'


def open_ledger(run: Path) -> sqlite3.Connection:
    """The ledger of a run to read from. Raises LedgerError where there is none, or it is damaged."""
    path = Path(run) / FILE
    if not path.is_file():
        raise LedgerError(f"run {str(run)!r} has no {FILE}; give the folder of a run that was trained, like runs/NAME")
    with _translated_errors(path):
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)
        _check(db, path)
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise LedgerError(f"{path} is damaged: {found}")
    return db


def _check(db: sqlite3.Connection, path: Path) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != VERSION:
        raise LedgerError(f"{path} is of version {version}, this Turnstile writes {VERSION}; use the one that made it")


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    """A full disk is told like that of any other file; what else SQLite says, with the file's name."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise LedgerError(f"{path}: {error}") from error
