"""Each trained token's share of a step, fixed before packing.

Shares are computed over all rows of one optimiser step, in logical units (tokens, turns, trajectories), never
in physical rows: packing, prefix sharing, splitting into micro-batches and context rewriting change no gradient.
A step's update is sum(weights * loss). Each kind returns one f32[L] for each row, 0 where the token is masked.
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
    """Every trained token counts the same: 1 / N. Long episodes weigh more. The shares sum to 1."""
    return _shares(rows, lambda row: np.zeros(len(row.token_ids), dtype=np.int64), lambda row, _: "all")


def turn(rows: Sequence[Row]) -> list[F32]:
    """Every turn with a trained token counts the same, its tokens share it. The shares sum to 1."""
    return _shares(rows, lambda row: row.turn_ids, lambda row, turn_id: (row.origin, turn_id))


def trajectory(rows: Sequence[Row]) -> list[F32]:
    """Every trajectory with a trained token counts the same, its tokens share it, over however many rows
    (GRPO's mean over each response, arXiv 2402.03300). The shares sum to 1."""
    return _shares(rows, lambda row: np.zeros(len(row.token_ids), dtype=np.int64), lambda row, _: row.origin)


def constant(rows: Sequence[Row], *, divisor: float) -> list[F32]:
    """Every trained token counts 1 / divisor whatever the step holds (Dr. GRPO, arXiv 2503.20783, divides by the
    attempts times the token budget of one). The shares sum to N / divisor."""
    if not divisor > 0:
        raise ConfigError(f"weights 'constant': divisor must be above 0, got {divisor}")
    return [np.where(row.loss_mask, np.float32(1.0 / divisor), np.float32(0.0)).astype(np.float32) for row in rows]


def _shares(
    rows: Sequence[Row], labels_of: Callable[[Row], NDArray[Any]], unit_of: Callable[[Row, int], Hashable]
) -> list[F32]:
    """1 / (units * trained tokens of the token's unit). `labels_of` gives int[L], which `unit_of` makes a name."""
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
