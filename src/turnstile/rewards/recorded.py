"""Reading what an environment recorded, with errors that say which signal is missing and who records it."""

from __future__ import annotations

from typing import Any

from turnstile.errors import ConfigError
from turnstile.types import Trajectory, Turn

RECORDED_BY = {
    "submitted": "swe",
    "modified": "swe",
    "resolved": "swe",
    "f2p_passed": "swe",
    "f2p_total": "swe",
    "p2p_passed": "swe",
    "p2p_total": "swe",
    "parsed": "swe",
    "command": "swe",
    "succeeded": "swe",
    "looked_at_failing_code": "swe",
    "ran_tests": "swe",
    "tests_passed": "swe",
    "consistent": "guess",
    "rounds": "guess",
}
"""signal -> the built-in environment that records it; an environment of your own may record any of them."""


def episode_signal(trajectory: Trajectory, name: str, needed_by: str) -> Any:
    """`Trajectory.signals[name]`. Raises ConfigError, naming the reward that wanted it, where it is missing."""
    if name not in trajectory.signals:
        raise _missing("the episode", name, needed_by, list(trajectory.signals))
    return trajectory.signals[name]


def turn_signal(turn: Turn, name: str, needed_by: str) -> Any:
    """`Turn.signals[name]`. Raises ConfigError, naming the reward that wanted it, where it is missing."""
    if name not in turn.signals:
        raise _missing("a turn", name, needed_by, list(turn.signals))
    return turn.signals[name]


def _missing(what: str, name: str, needed_by: str, recorded: list[str]) -> ConfigError:
    known = ", ".join(sorted(recorded)) or "nothing"
    who = f"the {RECORDED_BY[name]!r} environment records it" if name in RECORDED_BY else "no built-in environment does"
    return ConfigError(
        f"reward {needed_by!r} needs the signal {name!r}, which {what} did not record (recorded: {known}); {who}"
    )
