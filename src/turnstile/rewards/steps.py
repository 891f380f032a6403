"""Stepwise rewards of an agent that works with tools on code. Each gives f32[K], 1 where the turn earned it.

Scale them with the term's `weight`. They are immediate rewards: what an agent can collect without doing the
task, so they belong below the outcome, behind its gate (arXiv 2508.10548). Those that can be earned over and
over without progress count `once` by default. Each raises ConfigError where its signal was not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from turnstile.rewards.recorded import turn_signal
from turnstile.types import F32, Task, Trajectory, Turn


def valid_format(task: Task, trajectory: Trajectory, *, malus: float = 0.0) -> F32:
    """1 for a turn in which a tool call could be read, `-malus` for one in which none could."""
    return _where(trajectory, lambda turn: bool(turn_signal(turn, "parsed", "valid_format")), otherwise=-malus)


def command_succeeded(task: Task, trajectory: Trajectory, *, but: Sequence[str] = ("submit",)) -> F32:
    """1 for a turn whose command did what it was asked, save the commands in `but` (ending is no success)."""

    def earned(turn: Turn) -> bool:
        command = turn_signal(turn, "command", "command_succeeded")
        return bool(turn_signal(turn, "succeeded", "command_succeeded")) and command not in but

    return _where(trajectory, earned)


def looked_at_failing_code(task: Task, trajectory: Trajectory, *, once: bool = True) -> F32:
    """1 for the (first) turn that showed the code the failing tests run through."""
    name = "looked_at_failing_code"
    return _where(trajectory, lambda turn: bool(turn_signal(turn, name, name)), once=once)


def ran_tests(task: Task, trajectory: Trajectory, *, once: bool = True) -> F32:
    """1 for the (first) turn that ran the tests, whatever they said."""
    return _where(trajectory, lambda turn: bool(turn_signal(turn, "ran_tests", "ran_tests")), once=once)


def modified_code(task: Task, trajectory: Trajectory, *, once: bool = True) -> F32:
    """1 for the (first) turn that changed the code; `once` keeps edit-and-undo from paying."""
    return _where(trajectory, lambda turn: bool(turn_signal(turn, "modified", "modified_code")), once=once)


def _where(
    trajectory: Trajectory, earned: Callable[[Turn], bool], *, once: bool = False, otherwise: float = 0.0
) -> F32:
    hits = np.array([earned(turn) for turn in trajectory.turns], dtype=np.bool_)
    if once and hits.any():
        first = int(np.argmax(hits))
        hits[first + 1 :] = False
    return np.where(hits, np.float32(1.0), np.float32(otherwise)).astype(np.float32)
