"""Supervised fine-tuning on demonstrations, so that RL starts from an agent that can act."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from turnstile.batching.rows import rows_of
from turnstile.trainer.learner import Learner, Objective
from turnstile.types import F32, Row, Trajectory

TokenWeights = Callable[[Trajectory, int], F32]
"""(trajectory, turn) -> f32[n]: the weight of each token of a demonstrated turn."""


def demo_rows(demos: Sequence[Trajectory], token_weights: TokenWeights | None = None) -> list[Row]:
    """Return the rows of demonstrations, with token weights as advantages: 1, or what `token_weights` returns."""

    def credit(demo: Trajectory, turn: int) -> F32:
        if token_weights is None:
            return np.ones(len(demo.turns[turn].completion.token_ids), np.float32)
        return token_weights(demo, turn)

    return [
        replace(row, temperature=1.0)
        for demo in demos
        for row in rows_of(demo, [credit(demo, k) for k in range(len(demo.turns))])
        if row.loss_mask.any()
    ]


def warm_start(
    learner: Learner,
    rows: Sequence[Row],
    objective: Objective,
    *,
    epochs: int,
    batch: int,
    seed: int,
    report: Callable[[int, int, dict[str, float]], None] = lambda done, total, metrics: None,
) -> dict[str, float]:
    """Train on `rows` for `epochs` passes, and return the metrics of the last optimiser step.

    Each pass is shuffled by `seed` and split into mini-batches of `batch` rows. `report(done, total, metrics)` is
    called after each optimiser step.
    """
    order = np.random.default_rng(seed)
    batches = [part for _ in range(epochs) for part in _batches(order.permutation(len(rows)).tolist(), batch)]
    metrics: dict[str, float] = {}
    for done, members in enumerate(batches):
        metrics, _, _ = learner.update([rows[i] for i in members], objective)
        report(done + 1, len(batches), metrics)
    return metrics


def _batches(order: list[int], size: int) -> list[list[int]]:
    return [order[begin : begin + size] for begin in range(0, len(order), size)]
