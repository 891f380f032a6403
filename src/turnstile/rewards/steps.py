"""Stepwise rewards for an agent that works with tools. Each returns f32[K], with 1 for turns that earned it.

Scale them with the term's `weight`. They are immediate rewards, which an agent can collect without doing the task, so
they belong on a level below the outcome, behind its gate (arXiv 2508.10548). Each raises ConfigError if its signal was
not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from pydantic import NonNegativeFloat

from turnstile.rewards.recorded import turn_signal
from turnstile.types import F32, Task, Trajectory, Turn


def valid_format(task: Task, trajectory: Trajectory, *, malus: NonNegativeFloat = 0.0) -> F32:
    """Return 1 for each turn in which a tool call could be parsed, and `-malus` for any other, f32[K]."""
    return where(trajectory, lambda turn: bool(turn_signal(turn, "parsed", "valid_format")), otherwise=-malus)


def command_succeeded(task: Task, trajectory: Trajectory, *, but: Sequence[str] = ("submit",)) -> F32:
    """Return 1 for each turn whose command succeeded, except the commands in `but`, else 0, f32[K].

    By default `submit` is excepted, since ending the episode is not a success.
    """

    def earned(turn: Turn) -> bool:
        command = turn_signal(turn, "command", "command_succeeded")
        return bool(turn_signal(turn, "succeeded", "command_succeeded")) and command not in but

    return where(trajectory, earned)


def where(trajectory: Trajectory, earned: Callable[[Turn], bool], *, once: bool = False, otherwise: float = 0.0) -> F32:
    """Return 1 for each turn that `earned` accepts, else `otherwise`, f32[K]. With `once`, only the first counts."""
    hits = np.array([earned(turn) for turn in trajectory.turns], dtype=np.bool_)
    if once and hits.any():
        first = int(np.argmax(hits))
        hits[first + 1 :] = False
    return np.where(hits, np.float32(1.0), np.float32(otherwise)).astype(np.float32)
