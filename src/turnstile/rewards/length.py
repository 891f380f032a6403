"""Rewards that make long episodes worth less."""

from __future__ import annotations

import numpy as np

from turnstile.errors import ConfigError
from turnstile.rewards.recorded import episode_number
from turnstile.types import Stop, Task, Trajectory


def overlong(task: Task, trajectory: Trajectory, *, limit: int, buffer: int) -> float | None:
    """Return the soft overlong penalty in [-1, 0] for sampled tokens (DAPO, arXiv 2503.14476).

    It is 0 for up to limit - buffer tokens, -1 beyond `limit`, and falls linearly in between. Only trainable tokens
    count, over all turns; those of other agents do not. None if infrastructure failed. Raises ConfigError unless 0 <
    buffer <= limit.
    """
    if not 0 < buffer <= limit:
        raise ConfigError(f"reward 'overlong' wants 0 < buffer <= limit, got {buffer} and {limit}")
    if trajectory.stop is Stop.ERROR:
        return None
    sampled = sum(len(turn.completion.token_ids) for turn in trajectory.turns if turn.trainable)
    return float(np.clip((limit - buffer - sampled) / buffer, -1.0, 0.0))


def long_trajectory(task: Task, trajectory: Trajectory, *, threshold: int, most: int) -> float | None:
    """Return 0 for up to `threshold` turns, falling linearly to -1 at `most` turns (arXiv 2508.03501).

    `most` is the episode's limit. None if infrastructure failed. Raises ConfigError unless 0 <= threshold < most.
    """
    if not 0 <= threshold < most:
        raise ConfigError(f"reward 'long_trajectory' wants 0 <= threshold < most, got {threshold} and {most}")
    if trajectory.stop is Stop.ERROR:
        return None
    return float(np.clip((threshold - len(trajectory.turns)) / (most - threshold), -1.0, 0.0))


def efficiency(
    task: Task, trajectory: Trajectory, *, name: str = "outcome", signal: str = "", gamma: float = 0.97
) -> float | None:
    """Return the episode's signal, multiplied by gamma^(K-1) if it is above 0, for an episode of K turns.

    The same success is therefore worth less after more turns, while a longer failure is worth no more. This is after
    IterResearch (arXiv 2511.07327), which discounts each round's share in this way. `signal` names the signal; it
    defaults to the term's name (`name`). None if infrastructure failed or no verdict was recorded. Raises ConfigError
    if the signal is missing, and for gamma outside (0, 1].
    """
    if not 0.0 < gamma <= 1.0:
        raise ConfigError(f"reward 'efficiency' wants 0 < gamma <= 1, got {gamma}")
    if trajectory.stop is Stop.ERROR:
        return None
    value = episode_number(trajectory, signal or name, "efficiency")
    if value is None or value <= 0.0:
        return value
    return float(gamma ** max(len(trajectory.turns) - 1, 0) * value)
