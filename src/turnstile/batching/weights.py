"""Loss aggregation by the weights of trained tokens, which are fixed before packing.

Weights are computed over all rows of one optimiser step, in logical units (tokens, turns, trajectories) and never in
physical rows, so that packing, prefix sharing, splitting into micro-batches and context rewriting change no gradient. A
step's update is sum(weights * loss). Each kind returns one f32[L] for each row, 0 where the token is masked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnstile.errors import ConfigError
from turnstile.types import F32, Row


def token(rows: Sequence[Row]) -> list[F32]:
    """Weight every trained token by 1 / N, so that long episodes count more. The weights sum to 1."""
    return _unit_weights(rows, lambda row: np.zeros(len(row.token_ids), dtype=np.int64), lambda row, _: "all")


def turn(rows: Sequence[Row]) -> list[F32]:
    """Weight every turn with a trained token equally, divided among its trained tokens. The weights sum to 1."""
    return _unit_weights(rows, lambda row: row.turn_ids, lambda row, turn_id: (row.origin, turn_id))


def trajectory(rows: Sequence[Row]) -> list[F32]:
    """Weight every trajectory with a trained token equally, divided among its trained tokens across all its rows.

    This is GRPO's mean over each response (arXiv 2402.03300). The weights sum to 1.
    """
    return _unit_weights(rows, lambda row: np.zeros(len(row.token_ids), dtype=np.int64), lambda row, _: row.origin)


def constant(rows: Sequence[Row], *, divisor: float) -> list[F32]:
    """Weight every trained token by 1 / divisor, whatever else is in the step.

    Dr. GRPO (arXiv 2503.20783) divides by the number of attempts times the token budget of one attempt. The weights sum
    to N / divisor. Raises ConfigError if the divisor is not positive.
    """
    if not divisor > 0:
        raise ConfigError(f"weights 'constant': divisor must be above 0, got {divisor}")
    return [np.where(row.loss_mask, np.float32(1.0 / divisor), np.float32(0.0)).astype(np.float32) for row in rows]


def _unit_weights(
    rows: Sequence[Row], labels_of: Callable[[Row], NDArray[Any]], unit_of: Callable[[Row, int], Hashable]
) -> list[F32]:
    """Return 1 / (number of units * trained tokens in the token's unit) for each trained token, 0 for all others.

    `labels_of` returns the labels int[L] of a row's tokens; `unit_of` maps a row and a label to the unit that they
    denote.
    """
    sizes: Counter[Hashable] = Counter()
    for row in rows:
        for label, count in zip(*np.unique(labels_of(row)[row.loss_mask], return_counts=True), strict=True):
            sizes[unit_of(row, int(label))] += int(count)
    result = []
    for row in rows:
        labels, where = np.unique(labels_of(row)[row.loss_mask], return_inverse=True)
        shares = np.array([1.0 / (len(sizes) * sizes[unit_of(row, int(label))]) for label in labels], dtype=np.float64)
        weights = np.zeros(len(row.token_ids), dtype=np.float32)
        weights[row.loss_mask] = shares[where]
        result.append(weights)
    return result
