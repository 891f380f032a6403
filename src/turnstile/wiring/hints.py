"""A recipe's hint, which training prompts show in addition to the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile.config import Recipe
from turnstile.errors import ConfigError
from turnstile.rollout.hints import Hint
from turnstile.wiring.kinds import bind, takes

GIVEN = ("seed", "steps", "criteria")
CRITERIA = {"rubric": "criteria", "checklist": "items"}
"""Kinds of graders that judge by criteria, with the knob that holds the criteria."""


def make_hint(recipe: Recipe) -> Hint | None:
    """Return the hint of the kind that `hint.kind` names, a class or a function that returns a hint; None without one.

    Its parameters `seed`, `steps` and `criteria` are given the recipe's seed, the number of training steps, and the
    criteria of the first grader that has a mapping of them. Raises ConfigError for an unknown kind or knob.
    """
    if recipe.hint is None:
        return None
    maker = bind("hint", recipe.hint, given=GIVEN)
    given = {"seed": recipe.seed, "steps": recipe.train.steps, "criteria": _criteria(recipe)}
    try:
        hint: Hint = maker(**{name: value for name, value in given.items() if takes(maker, name)})
    except TypeError as error:
        raise ConfigError(f"hint kind {recipe.hint.kind!r}: {error}") from None
    if not callable(hint):
        raise ConfigError(
            f"hint kind {recipe.hint.kind!r} gave {type(hint).__name__}, not something that can be called"
        )
    return hint


def _criteria(recipe: Recipe) -> Mapping[str, Any] | None:
    for grader in recipe.graders:
        found = grader.knobs.get(CRITERIA.get(grader.kind, ""))
        if isinstance(found, Mapping):
            return found
    return None
