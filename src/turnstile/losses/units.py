"""Units of tokens (token, turn, trajectory), with sums and means over them."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError

Unit = Literal["token", "turn", "trajectory"]


def units(batch: Batch, unit: Unit, kind: str) -> Tensor:
    """Return the index of each token's unit, i64[N], counted from 0.

    Raises ConfigError, which names the loss `kind`, for an unknown unit.
    """
    match unit:
        case "token":
            return torch.arange(len(batch.target), device=batch.target.device)
        case "turn":
            pairs = torch.stack([batch.trajectory, batch.turn])
            _, index = torch.unique(pairs, dim=1, return_inverse=True)
        case "trajectory":
            _, index = torch.unique(batch.trajectory, return_inverse=True)
        case _:
            raise ConfigError(f"{kind!r}: unit must be 'token', 'turn' or 'trajectory', got {unit!r}")
    return cast(Tensor, index)


def sum_within(values: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of `values` [N] over each unit's tokens of non-zero weight, f64[units]."""
    count = int(index.max()) + 1 if len(index) else 0
    values = torch.where(weights != 0, values.double(), 0.0)
    return values.new_zeros(count).index_add(0, index, values)


def mean_within(values: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return, for each token, the mean of `values` over its unit's tokens of non-zero weight, [N]; 0 if it has none."""
    sizes = sum_within(torch.ones_like(values), index, weights)
    return (sum_within(values, index, weights) / sizes.clamp(min=1))[index].to(values.dtype)
