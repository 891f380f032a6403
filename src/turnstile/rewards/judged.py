"""Rewards from judges' verdicts, which are the signals that the graders of the same names write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile.errors import ConfigError
from turnstile.lookup import nearest
from turnstile.rewards.recorded import episode_signal
from turnstile.types import Stop, Task, Trajectory


def judge(task: Task, trajectory: Trajectory, *, signal: str = "judge") -> float | None:
    """Return the score in [0, 1] that a language model gave the episode, after stating its reasons (as in Think-RM).

    The score is the signal that the grader `judge` writes. None, never 0, if infrastructure failed or the judge gave no
    verdict. Raises ConfigError if the signal is missing or is not a number in [0, 1].
    """
    return _recorded_fraction(trajectory, signal, "judge")


def pairwise_judge(task: Task, trajectory: Trajectory, *, signal: str = "pairwise_judge") -> float | None:
    """Return the share of comparisons with the other attempts that the episode won, in [0, 1]. A tie counts half.

    A language model makes the comparisons, and the shares average 1/2 within a group (pairwise preferences as the
    reward, after Think-RM). The share is the signal that the grader `pairwise_judge` writes. None and errors as for
    `judge`.
    """
    return _recorded_fraction(trajectory, signal, "pairwise_judge")


def rubric(
    task: Task,
    trajectory: Trajectory,
    *,
    weights: Mapping[str, float] | None = None,
    key: str = "",
    signal: str = "rubric",
) -> float | None:
    """Return the weighted score of criteria, sum of w_i s_i / sum of the positive w_i, or 0 if that is negative.

    After RGR-GRPO and RuscaRL. A language model gave the s_i, in [0, 1]. Each criterion has weight 1 unless `weights`
    gives another, or the task's own `data[key]` (name -> number) if the task has it. A criterion that should not be met
    has a negative weight. The scores are the signal that the grader `rubric` writes. None and errors as for `judge`;
    ConfigError also for a weight of an unknown criterion, and if no weight is positive.
    """
    found = _verdicts(trajectory, signal, "rubric")
    if found is None:
        return None
    shares = {name: _number(value, f"{signal}.{name}", "rubric") for name, value in found.items()}
    return _weighted_mean(shares, _weights_of(task, key, weights, "rubric"), "rubric")


def checklist(
    task: Task,
    trajectory: Trajectory,
    *,
    weights: Mapping[str, float] | None = None,
    key: str = "",
    signal: str = "checklist",
) -> float | None:
    """Return the score of `rubric` with s_i = 1 for an item that is met and 0 for any other (after CM2).

    The items are the signal that the grader `checklist` writes, each with `met` and its evidence. None and errors as
    for `rubric`.
    """
    found = _verdicts(trajectory, signal, "checklist")
    if found is None:
        return None
    for name, item in found.items():
        if not isinstance(item, Mapping) or not isinstance(item.get("met"), bool):
            raise ConfigError(f"reward 'checklist' wants met to be true or false, but {signal}.{name} = {item!r}")
    return _weighted_mean(
        {name: float(item["met"]) for name, item in found.items()},
        _weights_of(task, key, weights, "checklist"),
        "checklist",
    )


def _recorded_fraction(trajectory: Trajectory, signal: str, kind: str) -> float | None:
    if trajectory.stop is Stop.ERROR:
        return None
    value = episode_signal(trajectory, signal, kind, grader=kind)
    return None if value is None else _number(value, signal, kind)


def _verdicts(trajectory: Trajectory, signal: str, kind: str) -> Mapping[str, Any] | None:
    if trajectory.stop is Stop.ERROR:
        return None
    found = episode_signal(trajectory, signal, kind, grader=kind)
    if found is not None and (not isinstance(found, Mapping) or not found):
        raise ConfigError(f"reward {kind!r} wants the signal {signal!r} to map names to verdicts, got {found!r}")
    return found


def _number(value: object, where: str, kind: str) -> float:
    if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"reward {kind!r} wants a number in [0, 1], but the episode recorded {where} = {value!r}")
    return float(value)


def _weights_of(task: Task, key: str, weights: Mapping[str, float] | None, kind: str) -> Mapping[str, float]:
    """Return the task's weights if it has some under `key`, else the recipe's `weights`."""
    found = task.data.get(key, weights) if key else weights
    numbers = found.values() if isinstance(found, Mapping) else ()
    if found is not None and not (isinstance(found, Mapping) and all(isinstance(one, int | float) for one in numbers)):
        raise ConfigError(f"reward {kind!r} wants weights to map names to numbers, got {found!r} for task {task.id!r}")
    return found or {}


def _weighted_mean(shares: Mapping[str, float], weights: Mapping[str, float], kind: str) -> float:
    for name in weights:
        if name not in shares:
            raise ConfigError(f"reward {kind!r} weighs {name!r}, of which there is no verdict; {nearest(name, shares)}")
    weighed = {name: float(weights.get(name, 1.0)) for name in shares}
    most = sum(weight for weight in weighed.values() if weight > 0)
    if not 0.0 < most < float("inf"):
        raise ConfigError(f"reward {kind!r} wants a weight above 0, got {dict(weights)!r}")
    return max(0.0, sum(weight * shares[name] for name, weight in weighed.items()) / most)
