"""Conversion of scored groups to training rows."""

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
class TrainingRows:
    """The training rows of one step, by group."""

    rows: list[list[Row]]  # one list for each trained group
    groups: list[int]  # index of each trained group in the step
    zero_advantage: int  # number of groups dropped because all their advantages are zero


def prepare(
    groups: Sequence[Group], scores: Sequence[Sequence[Score]], advantages: Advantages, *, drop_zero_advantage: bool
) -> TrainingRows:
    """Return the rows of all trajectories whose score is in the gradient.

    `drop_zero_advantage` drops groups whose advantages are all zero, as in DAPO's dynamic sampling (arXiv 2503.14476),
    but without sampling replacements. Such groups cost no forward and backward pass, their tokens do not count in the
    loss denominator, and regularisers do not see them. Raises TrainingError if advantages are not finite.
    """
    rows: list[list[Row]] = []
    indices: list[int] = []
    zero_advantage = 0
    credit = iter(advantages)
    for place, (group, group_scores) in enumerate(zip(groups, scores, strict=True)):
        group_advantages = [next(credit) for _ in group.trajectories]
        _check_finite(group, group_advantages)
        trained = [
            row
            for trajectory, score, turns in zip(group.trajectories, group_scores, group_advantages, strict=True)
            if score.in_gradient
            for row in rows_of(trajectory, turns)
            if row.loss_mask.any()
        ]
        if drop_zero_advantage and not any(np.any(row.advantages) for row in trained):
            zero_advantage += 1
        elif trained:
            rows.append(trained)
            indices.append(place)
    return TrainingRows(rows, indices, zero_advantage)


def _check_finite(group: Group, advantages: Advantages) -> None:
    for trajectory, turns in zip(group.trajectories, advantages, strict=True):
        if not all(np.isfinite(values).all() for values in turns):
            raise TrainingError(
                f"task {group.task.id!r}, attempt {trajectory.attempt}: the estimator returned advantages that are not "
                "finite (float32 ends at 3e38); scale the rewards down"
            )


def split(prepared: TrainingRows, parts: int) -> list[list[Row]]:
    """Return the rows of a step as at most `parts` mini-batches of whole groups."""
    bounds = np.linspace(0, len(prepared.rows), min(parts, len(prepared.rows)) + 1).astype(int)
    return [
        [row for group in prepared.rows[begin:end] for row in group]
        for begin, end in itertools.pairwise(bounds)
        if end > begin
    ]
