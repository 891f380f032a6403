"""Rewards that read what the agent said."""

from __future__ import annotations

import re

import numpy as np
from pydantic import NonNegativeFloat

from turnstile.errors import ConfigError
from turnstile.types import F32, Stop, Task, Trajectory


def exact(
    task: Task, trajectory: Trajectory, *, key: str = "answer", pattern: str = "", ignore_case: bool = True
) -> float | None:
    """Return 1 if the last message is the task's answer, `task.data[key]`, else 0. Outer whitespace is ignored.

    `pattern` finds the answer in the message: it is the last non-empty match, or the first group of that match. None if
    infrastructure failed. Raises ConfigError if the task has no such answer, or `pattern` is not a regular expression.
    """
    if trajectory.stop is Stop.ERROR:
        return None
    if key not in task.data:
        raise ConfigError(
            f"reward 'exact': task {task.id!r} has no {key!r} in its data (there: {', '.join(task.data) or 'nothing'})"
        )
    answer = trajectory.turns[-1].message.content if trajectory.turns else ""
    if pattern:
        found = [match for match in compile_pattern("exact", pattern).finditer(answer) if match.group()]
        answer = (found[-1].group(1) if found[-1].re.groups else found[-1].group()) if found else ""
    answer, wanted = (answer or "").strip(), str(task.data[key]).strip()
    return float(answer.casefold() == wanted.casefold() if ignore_case else answer == wanted)


def regex(task: Task, trajectory: Trajectory, *, pattern: str) -> float | None:
    """Return 1 if `pattern` is found in the last message, else 0; None if infrastructure failed.

    Raises ConfigError if `pattern` is not a regular expression.
    """
    search = compile_pattern("regex", pattern).search
    if trajectory.stop is Stop.ERROR:
        return None
    return float(bool(trajectory.turns and search(trajectory.turns[-1].message.content)))


def well_formed(task: Task, trajectory: Trajectory, *, pattern: str, malus: NonNegativeFloat = 0.0) -> F32:
    """Return 1 for each turn whose whole message matches `pattern`, and `-malus` for any other, f32[K].

    Outer whitespace is ignored. Raises ConfigError if `pattern` is not a regular expression.
    """
    matches = compile_pattern("format", pattern).fullmatch
    hits = [bool(matches(turn.message.content.strip())) for turn in trajectory.turns]
    return np.where(hits, 1.0, -malus).astype(np.float32)


def compile_pattern(kind: str, pattern: str) -> re.Pattern[str]:
    """Compile a pattern in which a dot matches any character. Raises ConfigError if it is not a regular expression."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward {kind!r}: {pattern!r} is no regular expression: {error}") from None
