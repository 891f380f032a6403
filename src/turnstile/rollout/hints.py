"""Hints in the prompts of training episodes, faded out over training (rubric scaffolding, RuscaRL)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Annotated, Literal, Protocol

from pydantic import Field, PositiveFloat

from turnstile.errors import ConfigError
from turnstile.types import Task


class Hint(Protocol):
    """A function (task, attempt, attempts in its group, training step from 1) -> hint for the prompt, "" for none.

    It must be deterministic, so that an attempt that is played again sees the same hint. It may have a method
    `check(task)` that raises ConfigError; it is called with every training task before a model is loaded.
    """

    def __call__(self, task: Task, attempt: int, attempts: int, step: int) -> str: ...


def hint_of(hint: Hint | None, task: Task, attempt: int, attempts: int, step: int | None) -> str:
    """Return an attempt's hint, or "" if `hint` is None or the attempt is not for training (`step` None)."""
    return "" if hint is None or step is None else hint(task, attempt, attempts, step)


class RubricHint:
    """Shows some of a task's N criteria in the prompt, namely round(group share * step share * N) of them.

    The criteria are drawn at random by seed, task, attempt and step (RuscaRL, arXiv 2508.16949). Training uses the
    prompt with the hint, as sampling did.

    With `within = "linear"`, the group share is (G - 1 - i) / (G - 1) for attempt i of G: the first attempt sees the
    most criteria and the last none. With `within = "none"` it is 1 for all attempts. The step share depends on the
    fraction x = (step - 1) / (steps - 1) of training that is done: it is 1 / (1 + exp(`steepness` * (x - `midpoint`)))
    with `decay = "sigmoid"`, 1 - x with "linear", and 1 with "none". The defaults are the paper's values for its
    medical tasks. The group share is 1 in a group of one, and the step share is 1 in a run of one step.

    The criteria are the task's `data[key]`, a mapping from names to criteria or a list of criteria; without that entry
    they are those of the recipe's grader `rubric` or `checklist`. Raises ConfigError for a task without criteria, and
    for knobs outside their range.
    """

    def __init__(
        self,
        *,
        seed: int,
        steps: int,
        criteria: Mapping[str, str] | None = None,
        key: str = "rubric",
        within: Literal["linear", "none"] = "linear",
        decay: Literal["sigmoid", "linear", "none"] = "sigmoid",
        midpoint: Annotated[float, Field(ge=0, le=1)] = 0.2,
        steepness: PositiveFloat = 125.0,
        heading: str = "Your work will be judged by these criteria:",
    ) -> None:
        if within not in ("linear", "none") or decay not in ("sigmoid", "linear", "none"):
            raise ConfigError(
                f"hint 'rubric': within is linear or none, decay sigmoid, linear or none; got {within!r} and {decay!r}"
            )
        if not 0.0 <= midpoint <= 1.0 or not 0.0 < steepness < math.inf:
            raise ConfigError(
                f"hint 'rubric' needs midpoint in [0, 1] and steepness above 0, got {midpoint} and {steepness}"
            )
        self._seed, self._steps, self._criteria, self._key = seed, steps, dict(criteria or {}), key
        self._within, self._decay, self._midpoint, self._steepness = within, decay, midpoint, steepness
        self._heading = heading

    def __call__(self, task: Task, attempt: int, attempts: int, step: int) -> str:
        """Return the heading and the criteria that an attempt is shown; "" if it is shown none."""
        criteria = self._criteria_of(task)
        count = round(self.shown_fraction(attempt, attempts, step) * len(criteria))
        drawn = random.Random(f"{self._seed}/{task.id}/{attempt}/{step}/rubric").sample(range(len(criteria)), count)
        return "\n".join([self._heading, *(f"- {criteria[place]}" for place in sorted(drawn))]) if drawn else ""

    def shown_fraction(self, attempt: int, attempts: int, step: int) -> float:
        """Return the fraction of the criteria that an attempt of a group is shown at a step, in [0, 1]."""
        group = 1.0 if attempts == 1 or self._within == "none" else (attempts - 1 - attempt) / (attempts - 1)
        if self._steps <= 1 or self._decay == "none":
            return group
        done = min(1.0, (step - 1) / (self._steps - 1))
        if self._decay == "linear":
            return group * (1.0 - done)
        return group * 0.5 * (1.0 - math.tanh(0.5 * self._steepness * (done - self._midpoint)))

    def check(self, task: Task) -> None:
        """Raise ConfigError if neither the task nor the recipe has criteria."""
        self._criteria_of(task)

    def _criteria_of(self, task: Task) -> list[str]:
        found = task.data.get(self._key, self._criteria)
        texts = list(found.values()) if isinstance(found, Mapping) else found
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            where = f"{self._key!r} in its data is {found!r:.60}"
            if self._key not in task.data:
                where = f"it has no {self._key!r} in its data, and no grader 'rubric' or 'checklist' names any"
            raise ConfigError(f"hint 'rubric' needs at least one criterion for task {task.id!r}, but {where}")
        return texts
