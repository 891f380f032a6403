"""Training episodes turn by turn, written as they are played, so that a crash costs the turns in flight and no more.

`RUN/record/000012-played.jsonl.gz` holds a line for each turn and one for each end of an attempt of step 12. What was
finished when a run was killed is taken from here when it goes on. Once a step is safe in checkpoints its record says
the same with scores and credit, and the journal of it goes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from turnstile.rollout.codec import decode, encode
from turnstile.rollout.members import Appender, read_members
from turnstile.types import Trajectory, Turn

Key = tuple[str, int]
"""(group, attempt): which episode of a run."""

_FILE = re.compile(r"(?P<step>\d{6,})-played\.jsonl\.gz")
_LEVEL = 1  # these files live for a few steps, and somebody waits for each turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A turn of an attempt, the `number`-th from 0; or its end, without its turns, of which there are `number`."""

    group: str
    attempt: int
    number: int
    turn: Turn | None = None
    end: Trajectory | None = None


class Journal:
    """What the attempts of training steps came to so far. Several threads may write."""

    def __init__(self, run: Path) -> None:
        self._lock = threading.Lock()
        self._folder = Path(run) / "record"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._appender = Appender(self._folder, level=_LEVEL)

    def turn(self, step: int, key: Key, number: int, turn: Turn) -> None:
        """Writes a turn down. Number 0 begins the attempt anew for readers."""
        self._write(step, Line(group=key[0], attempt=key[1], number=number, turn=turn))

    def end(self, step: int, trajectory: Trajectory) -> None:
        """Writes an attempt's end down; all its turns are there by now."""
        bare = replace(trajectory, turns=())
        self._write(step, Line(group=bare.group, attempt=bare.attempt, number=len(trajectory.turns), end=bare))

    def finished(self, step: int) -> Mapping[Key, Trajectory]:
        """The attempts at that step that came to an end, whole."""
        path = self._path(step)
        turns: dict[Key, list[Turn]] = {}
        found: dict[Key, Trajectory] = {}
        for line in (decode(body, Line) for body in read_members(path)) if path.exists() else ():
            key = (line.group, line.attempt)
            if line.turn is not None:
                if line.number == 0:
                    turns[key] = []
                    found.pop(key, None)
                turns.setdefault(key, []).append(line.turn)
            elif line.end is not None and len(turns.get(key, ())) == line.number:
                found[key] = replace(line.end, turns=tuple(turns.pop(key, ())))
        return found

    def drop_until(self, step: int) -> None:
        """Forgets the steps up to this one."""
        for path in self._folder.iterdir():
            if (match := _FILE.fullmatch(path.name)) and int(match["step"]) <= step:
                with self._lock:
                    self._appender.remove(path)

    def _write(self, step: int, line: Line) -> None:
        body = encode(line)
        with self._lock:
            self._appender.append(self._path(step), body)

    def _path(self, step: int) -> Path:
        return self._folder / f"{step:06d}-played.jsonl.gz"
