"""The update of one training step, from scored groups to new weights and the arrays to record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from turnstile.batching.rows import by_turn
from turnstile.credit.base import Advantages
from turnstile.records.record import LOGPROB, WEIGHT
from turnstile.trainer.activation_cache import RolloutActivations
from turnstile.trainer.learner import Learner, Objective
from turnstile.trainer.prepare import TrainingRows, split
from turnstile.types import F32, Group, Row

PerGroup = list[list[list[F32]]]
"""[group][trajectory][turn] -> f32[n]."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The metrics of an update, the arrays that it computed for each token, and the attempts in each pass.

    `weights` are the loss weights, `logprobs` the trainer's log-probabilities before the update, and `extras` the
    log-probabilities of other policies that the losses needed. `passes` lists (group, attempt) for each pass.
    """

    metrics: dict[str, float]
    weights: PerGroup
    logprobs: PerGroup
    passes: list[list[tuple[str, int]]]
    extras: Mapping[str, PerGroup] = field(default_factory=dict)

    def arrays(self, place: int) -> dict[str, list[list[F32]]]:
        """Return the arrays to record for the group with index `place`, by name."""
        named = {WEIGHT: self.weights, LOGPROB: self.logprobs, **self.extras}
        return {name: values[place] for name, values in named.items()}


def update(
    groups: Sequence[Group],
    prepared: TrainingRows,
    learner: Learner,
    objective: Objective,
    *,
    epochs: int,
    minibatches: int,
    rollout_activations: RolloutActivations | None = None,
    stored: tuple[Sequence[Row], Objective] | None = None,
) -> UpdateResult:
    """Train for `epochs` passes over the step's rows, with up to `minibatches` optimiser steps each.

    Every optimiser step also includes the `stored` rows. `rollout_activations` returns the frozen-layer activations
    that the rollout engine kept. Metrics are means over the optimiser steps, with these exceptions: tokens, seconds and
    skipped steps are summed, the gradient norm is the maximum, and the gap between sampler and trainer is from the
    first step, because later gaps include the policy's own change. The arrays are from the first pass over each row.
    """
    reports: list[dict[str, float]] = []
    first: dict[int, tuple[F32, F32]] = {}
    passes: list[list[tuple[str, int]]] = []
    # Rows are used again in later epochs, in the extra pass of a scoped loss, and as stored rows of later mini-batches.
    reuse = epochs > 1 or bool(objective.needs.scope) or (bool(stored) and minibatches > 1)
    activations = learner.activation_cache(rollout_activations, keep=reuse)
    for _ in range(epochs):
        passes.append([])
        for rows in split(prepared, minibatches):
            report, weights, logprobs = learner.update(rows, objective, activations, stored)
            reports.append(report)
            passes[-1] += dict.fromkeys(row.origin for row in rows)
            for row, w, lp in zip(rows, weights, logprobs, strict=True):
                first.setdefault(id(row), (w, lp))
    trained = [row for group in prepared.rows for row in group]
    return UpdateResult(
        _merge(reports),
        _per_turn(groups, trained, [first[id(row)][0] for row in trained]),
        _per_turn(groups, trained, [first[id(row)][1] for row in trained]),
        passes,
        {name: _per_turn(groups, trained, [row.extras[name] for row in trained]) for name in _logprob_names(trained)},
    )


def _logprob_names(rows: Sequence[Row]) -> list[str]:
    """Return the names of the log-probability arrays that all rows have, sorted."""
    names = set.intersection(*(set(row.extras) for row in rows)) if rows else set()
    return sorted(name for name in names if name.endswith("_logprobs"))


def per_group(groups: Sequence[Group], advantages: Advantages) -> PerGroup:
    """Return the advantages split by group: [group][trajectory][turn] -> f32[n]."""
    remaining = iter(advantages)
    return [[next(remaining) for _ in group.trajectories] for group in groups]


def _per_turn(groups: Sequence[Group], rows: Sequence[Row], values: Sequence[F32]) -> PerGroup:
    by_trajectory: dict[tuple[str, int], tuple[list[Row], list[F32]]] = {}
    for row, array in zip(rows, values, strict=True):
        its_rows, its_values = by_trajectory.setdefault(row.origin, ([], []))
        its_rows.append(row)
        its_values.append(array)
    return [[by_turn(t, *by_trajectory.get(t.key, ([], []))) for t in group.trajectories] for group in groups]


def _merge(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = [report[name] for report in reports if name in report]
        if name.startswith(("tokens/", "seconds/")) or name == "optim/skipped":
            merged[name] = float(np.sum(values))
        elif name == "optim/grad_norm":
            merged[name] = float(np.max(values))
        elif name == "policy/logprob_gap":
            merged[name] = values[0]
        else:
            merged[name] = float(np.mean(values))
    return merged
