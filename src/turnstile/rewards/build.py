"""Reward terms made from a recipe's tables, and scores of groups made with them.

A reward is a plain function `(task, trajectory, *, knobs) -> float | None` (one number per episode, None where
infrastructure failed) or `-> Sequence[float] | F32` (one number per turn). Your own takes an entry in the recipe:

    def brevity(task, trajectory, *, limit: int = 8) -> float:
        return 1.0 - len(trajectory.turns) / limit

    [[rewards.terms]]
    kind = "mine.rewards:brevity"
    limit = 6
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from turnstile.errors import ConfigError
from turnstile.lookup import nearest, resolve
from turnstile.rewards.base import Term, Threshold
from turnstile.rewards.compose import gated
from turnstile.rewards.on_stop import StopRules
from turnstile.types import Group, Score, Task, Trajectory
from turnstile.validation import check_types

Scope = Literal["episode", "turn"]


class Compose(Protocol):
    """The composition (terms, task, trajectory) -> Score of the terms into one reward."""

    def __call__(self, terms: Sequence[Term], task: Task, trajectory: Trajectory) -> Score: ...


def make_term(
    name: str,
    kind: str | Callable[..., Any],
    knobs: Mapping[str, Any] | None = None,
    *,
    level: int = 0,
    weight: float = 1.0,
    gate: Threshold | None = None,
    scope: Scope | None = None,
) -> Term:
    """Make a term. `kind` is a name in the reward table, `package.module:function`, or a function itself.

    `scope` defaults to what the function's return annotation says (a number: episode; a sequence or an array: turn),
    and to "episode" without an annotation. A function with a parameter `name` is given the term's name. Raises
    ConfigError for an unknown kind or knob, naming the nearest known one, which may be a knob of the function or a
    parameter of every term.
    """
    function = resolve("reward", kind) if isinstance(kind, str) else kind
    label = kind if isinstance(kind, str) else getattr(kind, "__name__", "function")
    if not callable(function):
        raise ConfigError(f"reward kind {label!r} is {type(function).__name__}, not a function")
    name = name or label
    given = _check_knobs(function, label, name, dict(knobs or {}))
    bound = functools.partial(function, **given) if given else function
    return Term(
        name=name,
        function=bound,
        scope=scope or _scope(function, label),
        level=level,
        weight=weight,
        gate=gate,
    )


def _check_knobs(function: Callable[..., Any], label: str, name: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """Return the knobs to bind, after checking them against the function's signature."""
    parameters = list(inspect.signature(function).parameters.values())
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known = [p.name for p in parameters[2:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for knob in knobs:
        if knob not in known and not takes_any:
            raise ConfigError(f"reward {label!r} has no knob {knob!r}; {nearest(knob, {*known, *_every_term_has()})}")
    check_types(f"reward {label!r}", function, knobs)
    if "name" in known:
        knobs.setdefault("name", name)
    try:
        inspect.signature(function).bind(None, None, **knobs)
    except TypeError as error:
        raise ConfigError(
            f"reward {label!r}: {error}; a reward is (task, trajectory, *, knobs) -> a number, or one for each turn"
        ) from None
    return knobs


def _every_term_has() -> set[str]:
    """Return the keys that every term has, which are not knobs of its function."""
    return {*inspect.signature(make_term).parameters} - {"knobs"}


def _scope(function: Callable[..., Any], label: str) -> Scope:
    try:
        annotation = typing.get_type_hints(function).get("return")
    except (NameError, TypeError):  # an annotation whose names are imported for type checkers only
        raise ConfigError(
            f"reward {label!r}: cannot tell from its annotations whether it judges an episode or each turn; "
            'add scope = "episode" or scope = "turn"'
        ) from None
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if typing.get_origin(annotation) is typing.Union:
        parts = typing.get_args(annotation)
    numbers = (float, int, bool, type(None), None, Any)
    return "episode" if all(part in numbers for part in parts) else "turn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Scores groups: composes the terms, then applies the stop rules. Pure, so a record can be scored again."""

    terms: tuple[Term, ...]
    compose: Compose = gated
    ends: StopRules = field(default_factory=StopRules)

    def score(self, task: Task, trajectory: Trajectory) -> Score:
        return self.ends.apply(self.compose(self.terms, task, trajectory), trajectory)

    def __call__(self, groups: Sequence[Group]) -> list[list[Score]]:
        """Return the scores, [group][trajectory]."""
        return [[self.score(group.task, trajectory) for trajectory in group.trajectories] for group in groups]
