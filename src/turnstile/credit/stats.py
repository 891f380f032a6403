"""Statistics that estimators share: float64 rewards, and their means and deviations over those that count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from turnstile.credit.base import EQUAL, Scores
from turnstile.errors import ConfigError, TrainingError
from turnstile.lookup import nearest
from turnstile.types import Group, Score

F64 = NDArray[np.float64]
Flags = NDArray[np.bool_]
Of = Literal["total", "outcome"]
Scale = Literal["std", "none"]
Eps = Annotated[float, Field(ge=0)]
"""The number added to a standard deviation before dividing by it."""
Normalise = Callable[[F64, Flags], F64]
"""(values, counted) -> values normalised by the statistics of those that count, of the same shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRewards:
    """The rewards of one group's trajectories, and which of them count in the baseline and which are trained on."""

    values: F64  # [G] rewards; 0 for a trajectory in neither baseline nor gradient
    in_baseline: Flags  # [G] whether it counts in the statistics
    in_gradient: Flags  # [G] whether it is trained on


def group_rewards(group: Group, scores: Sequence[Score], of: Of) -> GroupRewards:
    """Return one group's rewards: the total S_i or the outcome R_i. Raises TrainingError if one is not finite."""
    in_baseline = np.array([score.in_baseline for score in scores], dtype=np.bool_)
    in_gradient = np.array([score.in_gradient for score in scores], dtype=np.bool_)
    values = np.zeros(len(group.trajectories), dtype=np.float64)
    for index, (trajectory, score) in enumerate(zip(group.trajectories, scores, strict=True)):
        if not in_baseline[index] and not in_gradient[index]:
            continue
        value = score.total if of == "total" else float(sum(score.outcome.values())) if score.outcome else np.nan
        if not np.isfinite(value):
            raise not_finite(group, trajectory.attempt, f"{of} reward {value}")
        values[index] = value
    return GroupRewards(values=values, in_baseline=in_baseline, in_gradient=in_gradient)


def not_finite(group: Group, attempt: int, what: str) -> TrainingError:
    """Return the error for a reward or outcome that is not finite."""
    return TrainingError(
        f"task {group.task.id!r}, attempt {attempt}: {what} cannot be trained on; a reward must be finite, and an "
        "infrastructure failure must have outcome None"
    )


def centred(values: F64, counted: Flags) -> F64:
    """Return values - mean over `counted`; exactly 0 if fewer than two count or all that count are equal."""
    if flat(values, counted):
        return np.zeros_like(values)
    return values - np.float64(values[counted].mean())


def flat(values: F64, counted: Flags) -> bool:
    """Return whether the counted values carry no signal: fewer than two, or a range below `EQUAL`."""
    return equal(values[counted])


def equal(values: F64) -> bool:
    """Return whether all values are equal: fewer than two, or a range below `EQUAL`."""
    return len(values) < 2 or float(np.ptp(values)) < EQUAL


def standardised(values: F64, counted: Flags, *, ddof: int, eps: float) -> F64:
    """Return (values - mean) / (std + eps) over `counted`; exactly 0 in the same cases as for `centred`."""
    if flat(values, counted):
        return np.zeros_like(values)
    return centred(values, counted) / (np.float64(values[counted].std(ddof=ddof)) + eps)


def normaliser(kind: str, scale: Scale, *, ddof: int = 1, eps: Eps = 1e-6) -> Normalise:
    """Return `centred` or `standardised` with its knobs bound. Raises ConfigError for an unknown knob value."""
    check_knob(kind, "scale", scale, ("std", "none"))
    check_knob(kind, "ddof", ddof, (0, 1))
    return centred if scale == "none" else partial(standardised, ddof=ddof, eps=eps)


def relative(kind: str, groups: Sequence[Group], scores: Scores, normalise: Normalise, *, of: Of) -> F64:
    """Return each trajectory's reward, normalised within its group, f64[trajectories of the step]."""
    check_knob(kind, "of", of, ("total", "outcome"))
    check_scores(groups, scores)
    found = [group_rewards(group, group_scores, of) for group, group_scores in zip(groups, scores, strict=True)]
    return np.concatenate([normalise(m.values, m.in_baseline) for m in found]) if found else np.zeros(0)


def check_range(kind: str, low: float, high: float, **knobs: float) -> None:
    """Raise ConfigError if a knob is not within [low, high]."""
    for knob, value in knobs.items():
        if not low <= value <= high:
            bounds = f"at least {low:g}" if np.isinf(high) else f"within [{low:g}, {high:g}]"
            raise ConfigError(f"credit {kind!r}: {knob} = {value!r} must be {bounds}")


def check_knob(kind: str, knob: str, value: object, known: Sequence[object]) -> None:
    """Raise ConfigError, suggesting the nearest known value, if the value of a knob is unknown."""
    if value not in known:
        hint = nearest(value, [str(k) for k in known]) if isinstance(value, str) else f"known: {known}"
        raise ConfigError(f"credit {kind!r}: {knob} = {value!r} is not known; {hint}")


def check_scores(groups: Sequence[Group], scores: Scores) -> None:
    """Raise ValueError unless each group has one score per trajectory."""
    shapes = [len(group.trajectories) for group in groups], [len(group) for group in scores]
    if shapes[0] != shapes[1]:
        raise ValueError(f"groups of {shapes[0]} trajectories have {shapes[1]} scores")
