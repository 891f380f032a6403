"""The interface of advantage estimators, and `estimate`, the only function that calls them.

An estimator receives all groups of a step, because batch baselines need them. It returns arrays and never modifies its
inputs. What it keeps between steps (moving averages, for example) is its `state`, which checkpoints store.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from turnstile.errors import ShapeError
from turnstile.lookup import Part, unbound
from turnstile.types import F32, Group, Score, Turn

Advantages = list[list[F32]]
"""[trajectory][turn] -> f32[n], in the order of the groups' trajectories, for sampled tokens only."""

State = Mapping[str, Any]
Scores = Sequence[Sequence[Score]]
"""[group][trajectory]"""

Estimator = Callable[..., Any]
"""(groups, scores, **knobs) -> advantages. An estimator with a parameter `aux` receives the arrays of its learned part
by name (values, implicit rewards). One with a parameter `state` receives the state that it returned last, and returns
(advantages, state).

A trajectory that is not in the baseline takes no part in any statistic; one that is not in the gradient gets zeros.
"""
SHAPE = "(groups, scores, **knobs) -> [trajectory][turn] of f32[n], or with a parameter `state` (advantages, state)"
GIVEN = ("groups", "scores", "aux", "state")
"""The parameters of an estimator that are not knobs."""


def estimate(
    estimator: Estimator, groups: Sequence[Group], scores: Scores, aux: Mapping[str, Any], state: State
) -> tuple[Advantages, State]:
    """Return the advantages of an estimator, called with the arguments that it names, and the state for the next step.

    Raises ShapeError if it cannot be called this way, or if it returns something else.
    """
    signature = inspect.signature(estimator)
    given = {name: value for name, value in (("aux", aux), ("state", state)) if name in signature.parameters}
    try:
        signature.bind(groups, scores, **given)
    except TypeError as error:
        raise _misshapen(estimator, f"cannot be called: {error}") from None
    found = estimator(groups, scores, **given)
    if "state" not in given:
        found = found, state
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], list):
        raise _misshapen(estimator, f"returned {type(found if 'state' in given else found[0]).__name__}")
    return found


def _misshapen(estimator: Estimator, what: str) -> ShapeError:
    name = getattr(unbound(estimator), "__name__", type(estimator).__name__)
    return ShapeError(f"credit {name!r} {what}; an estimator is {SHAPE}")


Targets = Callable[..., Any]
"""(groups, scores, aux, **knobs) -> the targets that a critic learns, with NaN for no target: of sampled tokens,
[trajectory][turn] -> f32[n]; of turns, [trajectory] -> f64[K]; or of trajectories, f64[trajectories]."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def learned(section: str, path: str, targets: Targets | None = None) -> Callable[[_Function], _Function]:
    """Declare the part of a run that supplies an estimator's `aux` and learns beside the policy.

    `path` names the part's class as `module:Class`; it is a string because this package does not load torch. The class
    is an `AuxiliaryModel` (trainer/critic.py), whose keyword arguments are the keys of `[credit.SECTION]`. `targets`
    computes what the part learns.
    """

    def mark(function: _Function) -> _Function:
        cast(Any, function).part = Part(section=section, path=path)
        cast(Any, function).targets = targets
        return function

    return mark


def targets_of(estimator: Estimator) -> Targets | None:
    """Return the function that computes the targets of an estimator's learned part, with the estimator's knobs bound.

    Returns None if the estimator declares no targets.
    """
    targets: Targets | None = getattr(unbound(estimator), "targets", None)
    if targets is not None and isinstance(estimator, functools.partial):
        return functools.partial(targets, **estimator.keywords)
    return targets


def reads(knob: str) -> Callable[[_Function], _Function]:
    """Declare that an estimator compares turns by the signal named in its knob `knob`, which `unread` checks."""

    def mark(function: _Function) -> _Function:
        cast(Any, function).reads = knob
        return function

    return mark


def signal_name(turn: Turn, signal: str) -> str:
    """Return a turn's signal as a string, or "" if it is missing or False. 0 counts as a name."""
    value = turn.signals.get(signal)
    return "" if value is None or value is False else str(value)


def unread(estimator: Estimator, groups: Sequence[Group]) -> str | None:
    """Return a warning if an estimator compares turns by a signal that no turn of the groups has, else None.

    That part of the estimator then has no effect. The estimator's knobs may be bound.
    """
    inner = unbound(estimator)
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
"""Values whose range is below this count as equal, and give exactly zero."""


def to_tokens(group: Group, per_trajectory: Sequence[float]) -> Advantages:
    """Return the advantages of one group: each trajectory's value, repeated for each of its sampled tokens."""
    return [
        [np.full(len(turn.completion.token_ids), value, dtype=np.float32) for turn in trajectory.turns]
        for trajectory, value in zip(group.trajectories, per_trajectory, strict=True)
    ]
