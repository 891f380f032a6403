"""Rewards that return a recorded number."""

from __future__ import annotations

import numpy as np

from turnstile.rewards.recorded import episode_number, turn_number
from turnstile.types import F32, Stop, Task, Trajectory


def signal(
    task: Task,
    trajectory: Trajectory,
    *,
    name: str = "outcome",
    signal: str = "",
    scale: float = 1.0,
    offset: float = 0.0,
) -> float | None:
    """Return `scale * value + offset` for a number or bool that `Env.measure` recorded.

    `signal` names it; the default is the name of the term (`name`). None if infrastructure failed or the environment
    recorded None (no verdict). Raises ConfigError if the signal is missing or not a number.
    """
    if trajectory.stop is Stop.ERROR:
        return None
    value = episode_number(trajectory, signal or name, "signal")
    return None if value is None else scale * value + offset


def of_turns(
    task: Task, trajectory: Trajectory, *, name: str = "", signal: str = "", scale: float = 1.0, offset: float = 0.0
) -> F32:
    """Return `scale * value + offset` for a number or bool that `Env.step` recorded in each turn, f32[K].

    `signal` names it; the default is the name of the term (`name`). Raises ConfigError if a turn lacks the signal or
    recorded something else.
    """
    values = [turn_number(turn, signal or name, "turn_signal") for turn in trajectory.turns]
    return np.asarray([scale * value + offset for value in values], dtype=np.float32)


def env_reward(task: Task, trajectory: Trajectory, *, term: str = "") -> F32:
    """Return the environment's own step rewards, f32[K], either those of one `term` or the sum over all terms.

    A turn without any counts 0.
    """
    turns = trajectory.turns
    values = [turn.rewards.get(term, 0.0) if term else sum(turn.rewards.values()) for turn in turns]
    return np.asarray(values, dtype=np.float32)
