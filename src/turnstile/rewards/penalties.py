"""An outcome that faults reduce, and an auxiliary reward that fades out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import NonNegativeFloat

from turnstile.errors import ConfigError
from turnstile.rewards.recorded import episode_number, episode_signal
from turnstile.types import Stop, Task, Trajectory


def multiplicative(
    task: Task,
    trajectory: Trajectory,
    *,
    name: str = "outcome",
    signal: str = "",
    penalties: Mapping[str, float] | None = None,
    hard: Sequence[str] = (),
    cost: float = 0.0,
) -> float | None:
    """Return v * product of p_i^(n_i), or -`cost` if a `hard` fault occurred (after CaRL, arXiv 2504.17838).

    v is the episode's `signal` (default: the one with the term's name), at least 0. `penalties` maps signals to factors
    p_i in [0, 1]; n_i is how often the fault occurred, a number or a bool. A fault therefore costs a share of what was
    achieved and never more, so terms cannot be traded against each other. Hard faults are the signals in `hard` that
    are true or above 0; the environment should end the episode at such a fault.

        [[rewards.terms]]
        kind = "multiplicative"
        signal = "resolved"
        penalties = { ignored = 0.5 } # changed files that are tests
        hard = ["escaped"]

    None if infrastructure failed or a signal was recorded as None (no verdict). Raises ConfigError if a signal is
    missing or negative, since a smaller share of a loss would be a gain, and for a factor outside [0, 1].
    """
    for fault, factor in (penalties or {}).items():
        if not isinstance(factor, int | float) or not 0.0 <= factor <= 1.0:
            raise ConfigError(f"reward 'multiplicative' wants penalties in [0, 1], got {fault} = {factor!r}")
    if cost < 0.0:
        raise ConfigError(f"reward 'multiplicative' wants cost >= 0, got {cost}")
    if trajectory.stop is Stop.ERROR:
        return None
    value = episode_number(trajectory, signal or name, "multiplicative")
    if value is None:
        return None
    if not value >= 0.0:
        raise ConfigError(f"reward 'multiplicative' wants {signal or name} >= 0, got {value} in task {task.id!r}")
    counts = {fault: _fault_count(task, trajectory, fault) for fault in (*hard, *(penalties or {}))}
    if any(count is None for count in counts.values()):
        return None
    if any(counts[fault] for fault in hard):
        return 0.0 - cost  # not -0.0
    for fault, factor in (penalties or {}).items():
        value *= float(factor) ** float(counts[fault] or 0)
    return value


def _fault_count(task: Task, trajectory: Trajectory, fault: str) -> float | None:
    """Return how often a fault occurred, or None without a verdict."""
    count = episode_signal(trajectory, fault, "multiplicative")
    if count is None:
        return None
    if not isinstance(count, int | float) or not 0.0 <= count < math.inf:
        raise ConfigError(
            f"reward 'multiplicative' wants a count of 0 or more, but task {task.id!r} recorded {fault} = {count!r}"
        )
    return float(count)


def tool_bonus(
    task: Task,
    trajectory: Trajectory,
    *,
    steps: int,
    each: NonNegativeFloat = 0.1,
    most: NonNegativeFloat = 1.0,
    but: Sequence[str] = (),
) -> float | None:
    """Return mu(s) min(`most`, `each` * n) for n tool calls in the episode (after SPEAR, arXiv 2509.22601).

    mu(s) = (1 + cos(pi s / `steps`)) / 2 falls from 1 to 0 over the first `steps` training steps and stays there. The
    bonus lets a model that hardly calls tools find out what they do, and ends before calling them for nothing pays off.
    Calls of the tools in `but` do not count, nor do turns of other agents. The step is the signal training_step, which
    the grader `clock` writes; add it under [[graders]]. Outside training (None) the bonus is 0. None if infrastructure
    failed. Raises ConfigError if the signal is missing, and unless steps > 0.
    """
    if steps <= 0:
        raise ConfigError(f"reward 'tool_bonus' wants steps > 0, got {steps}")
    if trajectory.stop is Stop.ERROR:
        return None
    step = episode_number(trajectory, "training_step", "tool_bonus", grader="clock")
    if step is None or step >= steps:
        return 0.0
    calls = sum(call.name not in but for turn in trajectory.turns if turn.trainable for call in turn.message.tool_calls)
    return (1.0 + math.cos(math.pi * step / steps)) / 2.0 * min(most, each * calls)
