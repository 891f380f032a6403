"""A check that a step's rewards can affect its advantages, for estimators that compare attempts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from turnstile.config import Recipe
from turnstile.credit.base import GIVEN, Advantages, Estimator, State, estimate
from turnstile.credit.samples import sample_aux, sample_group, sample_score
from turnstile.errors import ConfigError
from turnstile.knobs import table
from turnstile.lookup import KINDS
from turnstile.types import F32, Group, Trajectory
from turnstile.wiring.kinds import bind

MOST = 4  # maximum number of made-up groups
OUTCOMES = (0.0, 1.0, 0.5, -1.0, 0.25, 1e3, 0.75, -1e3)
"""The groups' outcomes, used in rotation, on both sides of any likely threshold."""


def check_company(recipe: Recipe) -> None:
    """Raise ConfigError if groups have one attempt and the recipe's estimator compares attempts.

    No reward would then change an advantage, and the run would silently train on nothing. A built-in kind is tried with
    its knobs on made-up groups of one, over several steps. A kind of the user's own is not checked, nor is a recipe
    whose loss needs no advantages and that trains on groups without any.
    """
    train, rollout, kind = recipe.train, recipe.rollout, recipe.credit.kind
    if rollout.group_size > 1 or kind not in KINDS["credit"]:
        return
    losses = (recipe.loss.kind, *(regularizer.kind for regularizer in recipe.regularizers))
    learns_anyway = any(table()["loss"].get(loss, {}).get("rewardless") for loss in losses)
    if learns_anyway and not train.drop_zero_advantage_groups:
        return
    estimator = bind("credit", recipe.credit, given=GIVEN)
    groups = [_single_attempt_group(number) for number in range(min(rollout.tasks_per_step, MOST))]
    first, *others = _advantages_by_step(estimator, groups)
    if all(_equal_advantages(first, other) for other in others):
        raise ConfigError(
            f"rollout.group_size = 1 leaves credit.kind = {kind!r} nothing to compare in "
            f"{rollout.tasks_per_step} groups of one, so no reward would change an advantage; take more "
            "attempts, or a credit that needs no group, like gae or, with rollout.tasks_per_step above 1, reinforce"
        )


def _single_attempt_group(number: int) -> Group:
    """Return a made-up group of one attempt, which never visits a state twice."""
    group = sample_group(np.random.default_rng(number), f"g{number}", (4,))
    return replace(group, trajectories=tuple(map(_with_distinct_states, group.trajectories)))


def _with_distinct_states(trajectory: Trajectory) -> Trajectory:
    turns = tuple(replace(turn, state_key=f"state {place}") for place, turn in enumerate(trajectory.turns))
    return replace(trajectory, parent=None, turns=turns)


def _advantages_by_step(estimator: Estimator, groups: list[Group]) -> list[Advantages]:
    """Return the advantages of several steps, passing the state that each step returns to the next.

    The steps differ in their rewards and in the auxiliary models' values.
    """
    rng = np.random.default_rng(0)
    found: list[Advantages] = []
    state: State = {}
    for step in range(len(OUTCOMES)):
        scores = [
            [sample_score(OUTCOMES[(step + place) % len(OUTCOMES)], _rewards(rng, one)) for one in group.trajectories]
            for place, group in enumerate(groups)
        ]
        aux = {name: _scale(step + 1, values) for name, values in sample_aux(groups).items()}
        advantages, state = estimate(estimator, groups, scores, aux, state)
        found.append(advantages)
    return found


def _scale(factor: int, values: Any) -> Any:
    return [_scale(factor, each) for each in values] if isinstance(values, list) else factor * values


def _rewards(rng: np.random.Generator, trajectory: Trajectory) -> F32:
    return rng.normal(size=len(trajectory.turns)).astype(np.float32)


def _equal_advantages(one: Advantages, other: Advantages) -> bool:
    return all(
        np.array_equal(values, others)
        for turns, theirs in zip(one, other, strict=True)
        for values, others in zip(turns, theirs, strict=True)
    )
