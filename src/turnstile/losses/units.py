"""Units of tokens (token, turn, trajectory), and sums and means over them."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError

Unit = Literal["token", "turn", "trajectory"]


def units(batch: Batch, unit: Unit, kind: str) -> Tensor:
    """Return i64[N]: the index of each token's unit, from 0.

    `kind` is named in the ConfigError for an unknown unit.
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
    """Return f64[units]: the sum of `values` [N] over each unit's tokens of non-zero weight."""
    count = int(index.max()) + 1 if len(index) else 0
    values = torch.where(weights != 0, values.double(), 0.0)
    return values.new_zeros(count).index_add(0, index, values)


def mean_within(values: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return [N]: for each token the mean of `values` over its unit's tokens of non-zero weight (0 if none)."""
    sizes = sum_within(torch.ones_like(values), index, weights)
    return (sum_within(values, index, weights) / sizes.clamp(min=1))[index].to(values.dtype)
