"""The journal of training episodes, written turn by turn as they are played, so a crash costs only turns in flight.

`RUN/record/000012-played.jsonl.gz` holds three lines for each turn of step 12 (sampled, action delivered, completed by
the answer) and one for each end of an attempt. When an interrupted run resumes, finished attempts are restored from
here. Once a checkpoint covers a step, its record holds the same data with scores and credit, and its journal is
removed.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from turnstile.errors import LedgerError
from turnstile.records.codec import decode, encode
from turnstile.records.gzip_log import Appender, read_members
from turnstile.types import JSON, Stage, Trajectory, Turn

Key = tuple[str, int]
"""(group, attempt): identifies an episode of a run."""

_FILE = re.compile(r"(?P<step>\d{6,})-played\.jsonl\.gz")
_COMPRESSION_LEVEL = 1  # fast, since every turn waits for the write and the files last only a few steps
_FIELDS = tuple(each.name for each in fields(Turn))
_SAMPLED = ("context_ids", "completion", "message", "fresh")  # fields that later stages do not change
_FIELDS_OF_STAGE = {
    Stage.SAMPLED: _FIELDS,
    Stage.DELIVERED: ("state_key", "stage"),
    Stage.COMPLETED: tuple(name for name in _FIELDS if name not in _SAMPLED),
}
"""The fields of `Turn` that the line of each stage holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalLine:
    """One line, for either a stage of an attempt's turn `number` (from 0) or the attempt's `end`.

    `turn` has the fields of `Turn` that became known at this stage. `end` is the trajectory without its turns, and
    `stages` holds the stages that its turns reached. An attempt may be played several times; each has its own `playing`
    id, so the lines of one never complete those of another, even if some are lost.
    """

    group: str
    attempt: int
    playing: str
    number: int = 0
    turn: Mapping[str, JSON] = field(default_factory=dict)
    end: Trajectory | None = None
    stages: tuple[Stage, ...] = ()


class Journal:
    """The journal of a run. Several threads may write to it."""

    def __init__(self, run: Path) -> None:
        self._lock = threading.Lock()
        self._folder = Path(run) / "record"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._appender = Appender(self._folder, level=_COMPRESSION_LEVEL)
        self._playing: dict[Key, str] = {}

    def turn(self, step: int, key: Key, number: int, turn: Turn) -> None:
        """Record the stage that a turn has reached. A newly sampled turn 0 starts the attempt afresh."""
        if number == 0 and turn.stage is Stage.SAMPLED:
            self._playing[key] = _new_id()
        known = {name: encode(getattr(turn, name)) for name in _FIELDS_OF_STAGE[turn.stage]}
        self._write(
            step, JournalLine(group=key[0], attempt=key[1], playing=self._playing[key], number=number, turn=known)
        )

    def end(self, step: int, trajectory: Trajectory) -> None:
        """Record the end of an attempt. Requires that its turns were recorded before."""
        bare = replace(trajectory, turns=())
        playing = self._playing.pop(bare.key, None) or _new_id()
        stages = tuple(turn.stage for turn in trajectory.turns)
        self._write(step, JournalLine(group=bare.group, attempt=bare.attempt, playing=playing, end=bare, stages=stages))

    def finished_attempts(self, step: int) -> Mapping[Key, Trajectory]:
        """Return the attempts of a step that ended and whose lines are complete.

        Raises LedgerError for a file of another version.
        """
        path = self._path(step)
        playing: dict[Key, str] = {}
        turns: dict[Key, dict[int, dict[str, JSON]]] = {}
        finished: dict[Key, Trajectory] = {}
        for line in _lines(path):
            key = (line.group, line.attempt)
            if playing.get(key) != line.playing:
                playing[key] = line.playing
                turns[key] = {}
                finished.pop(key, None)
            if line.end is None:
                turns.setdefault(key, {}).setdefault(line.number, {}).update(line.turn)
            elif (complete := _complete_turns(turns.pop(key, {}), line.stages)) is not None:
                finished[key] = replace(line.end, turns=complete)
        return finished

    def drop_until(self, step: int) -> None:
        """Remove the journals of all steps up to and including this one."""
        for path in self._folder.iterdir():
            if (match := _FILE.fullmatch(path.name)) and int(match["step"]) <= step:
                with self._lock:
                    self._appender.remove(path)

    def _write(self, step: int, line: JournalLine) -> None:
        body = encode(line)
        with self._lock:
            self._appender.append(self._path(step), body)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:06d}-played.jsonl.gz"


def _lines(path: Path) -> Iterator[JournalLine]:
    for body in read_members(path) if path.exists() else ():
        if "playing" not in body:
            raise LedgerError(
                f"{path} was written by another version of Turnstile; continue with that one, or remove the file to "
                "play the episodes of its step again"
            )
        yield decode(body, JournalLine)


def _new_id() -> str:
    return secrets.token_hex(4)


def _complete_turns(turns: Mapping[int, Mapping[str, JSON]], stages: Sequence[Stage]) -> tuple[Turn, ...] | None:
    """Return the turns of an attempt that reached these stages, or None if a line is missing."""
    complete = []
    for number, stage in enumerate(stages):
        known = turns.get(number, {})
        if len(known) < len(_FIELDS) or known["stage"] != stage:
            return None
        complete.append(decode(known, Turn))
    return tuple(complete)
