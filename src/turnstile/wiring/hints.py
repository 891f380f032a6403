"""A recipe's hint: what training's prompts show besides the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnstile.config import Recipe
from turnstile.errors import ConfigError
from turnstile.rollout.hints import Hint
from turnstile.wiring.kinds import bind, takes

GIVEN = ("seed", "steps", "criteria")
CRITERIA = {"rubric": "criteria", "checklist": "items"}
"""Kinds of graders that judge by criteria, and which knob has them."""


def make_hint(recipe: Recipe) -> Hint | None:
    """Return the hint that `hint.kind` names: a class, or a function that returns one.

    It is given those that it names of the recipe's seed, the training steps, and the criteria of the first grader that
    has some. Raises ConfigError for an unknown kind or knob.
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
