"""Accessors of recorded signals, whose errors say which signal is missing and which ones were recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from turnstile.errors import ConfigError
from turnstile.types import Trajectory, Turn


def episode_signal(trajectory: Trajectory, name: str, needed_by: str, *, grader: str = "") -> Any:
    """Return `Trajectory.signals[name]`. Raises ConfigError if it is missing.

    The error names the reward that needs the signal, and the kind of `grader` that writes it, if any.
    """
    if name not in trajectory.signals:
        raise _missing("the episode", "measure()", name, needed_by, list(trajectory.signals), grader)
    return trajectory.signals[name]


def episode_number(trajectory: Trajectory, name: str, needed_by: str, *, grader: str = "") -> float | None:
    """Return `Trajectory.signals[name]`, a number or a bool, as a float; None if None was recorded.

    Raises ConfigError if it is missing, of another type, or not finite.
    """
    value = episode_signal(trajectory, name, needed_by, grader=grader)
    return None if value is None else _number(value, "the episode", name, needed_by)


def turn_number(turn: Turn, name: str, needed_by: str) -> float:
    """Return `Turn.signals[name]`, a number or a bool, as a float.

    Raises ConfigError if it is missing, of another type, or not finite.
    """
    return _number(turn_signal(turn, name, needed_by), "a turn", name, needed_by)


def turn_signal(turn: Turn, name: str, needed_by: str) -> Any:
    """Return `Turn.signals[name]`. Raises ConfigError if it is missing, naming the reward that needs it."""
    if name not in turn.signals:
        raise _missing("a turn", "step()", name, needed_by, list(turn.signals))
    return turn.signals[name]


def _number(value: object, what: str, name: str, needed_by: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"reward {needed_by!r} wants a number, but {what} recorded {name} = {value!r:.80}")
    return float(value)


def _missing(
    what: str, where: str, name: str, needed_by: str, recorded: Sequence[str], grader: str = ""
) -> ConfigError:
    known = ", ".join(sorted(recorded)) or "nothing"
    close = get_close_matches(name, recorded, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? Otherwise" if close else "either"
    if grader:
        hint = f'add [[graders]] kind = "{grader}" to the recipe, or'
    return ConfigError(
        f"reward {needed_by!r} needs the signal {name!r}, which {what} did not record (recorded: {known}); {hint} "
        f"let {where} of the environment give it, or take another reward"
    )
