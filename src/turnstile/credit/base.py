"""Who deserves it: the shape of an advantage estimator.

An estimator sees every group of one step, because batch baselines need it, and returns arrays; it never
changes what it was given. What it remembers between steps (moving baselines) is its `state`, which goes into
the checkpoint.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from turnstile.types import F32, Group, Score, Turn

Advantages = list[list[F32]]
"""[trajectory][turn] -> f32[n], in the order of the groups' trajectories, for sampled tokens only."""

State = Mapping[str, Any]
Scores = Sequence[Sequence[Score]]
"""[group][trajectory]"""


class Estimator(Protocol):
    """(groups, scores, aux, state, **knobs) -> (advantages, state).

    `aux` holds arrays that learned parts computed (values, implicit rewards), by name. A trajectory whose
    score is out of the baseline takes no part in any statistic; one out of the gradient gets zeros.
    """

    def __call__(
        self, groups: Sequence[Group], scores: Scores, aux: Mapping[str, Any], state: State, **knobs: Any
    ) -> tuple[Advantages, State]: ...


Targets = Callable[..., Any]
"""(groups, scores, aux, **knobs) -> what a critic is to learn, NaN where nothing: at each sampled token
[trajectory][turn] -> f32[n], at each turn [trajectory] -> f64[K], or of each trajectory f64[trajectories]."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def learned(part: str, targets: Targets | None = None) -> Callable[[_Function], _Function]:
    """Writes on an estimator which learned part it takes its `aux` from, and what that is to learn where the estimator
    has a word in it: `values` (a critic at each token), `utterance` (a critic of turns), `implicit` (a process reward
    learned from outcomes), `progress` (contributions of turns that add up to the outcome)."""

    def mark(function: _Function) -> _Function:
        cast(Any, function).learned = part
        cast(Any, function).targets = targets
        return function

    return mark


def learned_of(estimator: Callable[..., Any]) -> str | None:
    """The learned part that an estimator needs, also one whose knobs are bound; None where it needs none."""
    inner = estimator.func if isinstance(estimator, functools.partial) else estimator
    part: str | None = getattr(inner, "learned", None)
    return part


def targets_of(estimator: Callable[..., Any]) -> Targets | None:
    """What the critic of an estimator is to learn, its knobs bound as the estimator's are; None where it needs none."""
    inner = estimator.func if isinstance(estimator, functools.partial) else estimator
    targets: Targets | None = getattr(inner, "targets", None)
    if targets is not None and isinstance(estimator, functools.partial):
        return functools.partial(targets, **estimator.keywords)
    return targets


def reads(knob: str) -> Callable[[_Function], _Function]:
    """Writes on an estimator that it compares turns by a signal of theirs, which its knob `knob` names; `unread` says
    where there is none."""

    def mark(function: _Function) -> _Function:
        cast(Any, function).reads = knob
        return function

    return mark


def named(turn: Turn, signal: str) -> str:
    """What a turn's signal says, in words: 0 is a name like any other; "" where it says nothing or is missing."""
    value = turn.signals.get(signal)
    return "" if value is None or value is False else str(value)


def unread(estimator: Callable[..., Any], groups: Sequence[Group]) -> str | None:
    """One line where an estimator compares turns by a signal that none of the turns of these groups has, so that this
    part of it does nothing; also of one whose knobs are bound. None where all is well."""
    inner = estimator.func if isinstance(estimator, functools.partial) else estimator
    knob: str | None = getattr(inner, "reads", None)
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    if knob is None or not turns:
        return None
    bound = estimator.keywords if isinstance(estimator, functools.partial) else {}
    signal = bound.get(knob, inspect.signature(inner).parameters[knob].default)
    if any(signal in turn.signals for turn in turns):
        return None
    known = ", ".join(sorted({name for turn in turns for name in turn.signals})) or "none"
    name = getattr(inner, "__name__", "")
    return (
        f"credit {name!r} compares turns by their signal {signal!r}, which none of {len(turns)} turns has, so that "
        f"only whole attempts are compared; let the environment record it, or name another in credit.{knob} "
        f"(recorded: {known})"
    )


EQUAL = 1e-8
"""A range of values below this counts as all equal, and gives exactly zero."""


def to_tokens(group: Group, per_trajectory: Sequence[float]) -> Advantages:
    """One advantage per trajectory, given to each of its sampled tokens."""
    return [
        [np.full(len(turn.completion.token_ids), value, dtype=np.float32) for turn in trajectory.turns]
        for trajectory, value in zip(group.trajectories, per_trajectory, strict=True)
    ]
