"""From judged groups to training rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnstile.batching.rows import rows_of
from turnstile.credit.base import Advantages
from turnstile.errors import TrainingError
from turnstile.types import Group, Row, Score


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows of one step, those of one group together, and which groups gave none."""

    rows: list[list[Row]]  # by group that is trained
    groups: list[int]  # index of that group in the step
    flat: int  # groups left out because every advantage in them is zero


def prepare(
    groups: Sequence[Group], scores: Sequence[Sequence[Score]], advantages: Advantages, *, drop_zero_advantage: bool
) -> Prepared:
    """Rows of every trajectory that is in the gradient.

    With `drop_zero_advantage`, groups whose advantages are all zero are left out, as in the dynamic sampling of DAPO
    (arXiv 2503.14476), but without sampling others in their place: they cost no forward and backward pass, their
    tokens take no share of the weights, and regularisers do not see them.
    """
    rows: list[list[Row]] = []
    kept: list[int] = []
    flat = 0
    credit = iter(advantages)
    for place, (group, group_scores) in enumerate(zip(groups, scores, strict=True)):
        own = [next(credit) for _ in group.trajectories]
        _check(group, own)
        made = [
            row
            for trajectory, score, turns in zip(group.trajectories, group_scores, own, strict=True)
            if score.in_gradient
            for row in rows_of(trajectory, turns)
            if row.loss_mask.any()
        ]
        if drop_zero_advantage and not any(np.any(row.advantages) for row in made):
            flat += 1
        elif made:
            rows.append(made)
            kept.append(place)
    return Prepared(rows, kept, flat)


def _check(group: Group, advantages: Advantages) -> None:
    for trajectory, turns in zip(group.trajectories, advantages, strict=True):
        if not all(np.isfinite(values).all() for values in turns):
            raise TrainingError(
                f"task {group.task.id!r}, attempt {trajectory.attempt}: the estimator gave advantages that are not "
                "finite (float32 ends at 3e38); scale the rewards"
            )


def split(prepared: Prepared, parts: int) -> list[list[Row]]:
    """The rows of a step as at most `parts` mini-batches, whole groups each."""
    bounds = np.linspace(0, len(prepared.rows), min(parts, len(prepared.rows)) + 1).astype(int)
    return [
        [row for group in prepared.rows[begin:end] for row in group]
        for begin, end in itertools.pairwise(bounds)
        if end > begin
    ]
