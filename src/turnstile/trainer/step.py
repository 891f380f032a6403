"""The update half of a training step: judged groups in, new weights and what was trained out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from turnstile.batching.rows import by_turn
from turnstile.credit.base import Advantages
from turnstile.records.record import LOGPROB, WEIGHT
from turnstile.trainer.activation_cache import RolloutActivations
from turnstile.trainer.learner import Learner, Objective
from turnstile.trainer.prepare import Prepared, split
from turnstile.types import F32, Group, Row

PerGroup = list[list[list[F32]]]
"""[group][trajectory][turn] -> f32[n]"""


@dataclass(frozen=True, slots=True)
class Trained:
    """What an update saw, token by token: the loss weights, the trainer's log-probabilities before it, and the other
    policies' that its losses needed; and which attempts it trained on in each pass."""

    metrics: dict[str, float]
    weights: PerGroup
    logprobs: PerGroup
    passes: list[list[tuple[str, int]]]
    extras: Mapping[str, PerGroup] = field(default_factory=dict)

    def arrays(self, place: int) -> dict[str, list[list[F32]]]:
        """What a record keeps of group `place`."""
        named = {WEIGHT: self.weights, LOGPROB: self.logprobs, **self.extras}
        return {name: values[place] for name, values in named.items()}


def update(
    groups: Sequence[Group],
    prepared: Prepared,
    learner: Learner,
    objective: Objective,
    *,
    epochs: int,
    minibatches: int,
    trunk: RolloutActivations | None = None,
    stored: tuple[Sequence[Row], Objective] | None = None,
) -> Trained:
    """`epochs` passes over the step's rows in `minibatches` optimiser steps each, every one of them over the `stored`
    rows too. `trunk` is what the rollout left of what the frozen layers gave.

    Metrics are means over the optimiser steps, sums for tokens and seconds, the worst for the gradient's norm, and
    the first for the gap between sampler and trainer (later ones hold what was learnt since).
    The arrays are those of the first pass, when the policy was still the one that sampled.
    """
    reports: list[dict[str, float]] = []
    seen: dict[int, tuple[F32, F32]] = {}
    passes: list[list[tuple[str, int]]] = []
    again = epochs > 1 or bool(objective.needs.whole) or (bool(stored) and minibatches > 1)  # some rows come again
    trunks = learner.trunks(trunk, keep=again)
    for _ in range(epochs):
        passes.append([])
        for rows in split(prepared, minibatches):
            report, weights, logprobs = learner.update(rows, objective, trunks, stored)
            reports.append(report)
            passes[-1] += dict.fromkeys(row.origin for row in rows)
            for row, w, lp in zip(rows, weights, logprobs, strict=True):
                seen.setdefault(id(row), (w, lp))
    trained = [row for group in prepared.rows for row in group]
    return Trained(
        _merge(reports),
        _per_turn(groups, trained, [seen[id(row)][0] for row in trained]),
        _per_turn(groups, trained, [seen[id(row)][1] for row in trained]),
        passes,
        {name: _per_turn(groups, trained, [row.extras[name] for row in trained]) for name in _kept(trained)},
    )


def _kept(rows: Sequence[Row]) -> list[str]:
    """The arrays of log-probabilities that all rows have."""
    names = set.intersection(*(set(row.extras) for row in rows)) if rows else set()
    return sorted(name for name in names if name.endswith("_logprobs"))


def per_group(groups: Sequence[Group], advantages: Advantages) -> PerGroup:
    """Advantages in the order of trajectories, by group."""
    rest = iter(advantages)
    return [[next(rest) for _ in group.trajectories] for group in groups]


def _per_turn(groups: Sequence[Group], rows: Sequence[Row], values: Sequence[F32]) -> PerGroup:
    of: dict[tuple[str, int], tuple[list[Row], list[F32]]] = {}
    for row, array in zip(rows, values, strict=True):
        own = of.setdefault(row.origin, ([], []))
        own[0].append(row)
        own[1].append(array)
    return [[by_turn(t, *of.get(t.key, ([], []))) for t in group.trajectories] for group in groups]


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
