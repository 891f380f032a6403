"""The tensors of one update: rows merged into prefix trees.

Tokens lie in depth-first order; token q may attend to token k iff `k <= q < subtree_end[k]`; `positions` are depths.
Rows without a shared prefix are trees with one branch, so plain packing has the same layout. A trained token is a pair
(source slot, target id): `source` indexes [T], because one hidden state can have several next tokens. Per-token arrays
of the N trained tokens stay in the order of rows and turns, with or without sharing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A forest of T unique tokens in `trees` (slices of [T] that do not see each other), with N trained tokens."""

    tokens: Tensor  # i64[T]
    positions: Tensor  # i64[T]
    subtree_end: Tensor  # i64[T]
    trees: tuple[tuple[int, int], ...]  # (begin, end) of each tree in [T]
    source: Tensor  # i64[N] slot whose hidden state predicts the token
    target: Tensor  # i64[N] the token
    row: Tensor  # i64[N] index of the row in the step
    turn: Tensor  # i64[N] index of the turn in its trajectory
    trajectory: Tensor  # i64[N] index of the trajectory in the step
    group: Tensor  # i64[N] index of its group in the step
    attempt: Tensor  # i64[N] number of the attempt in its group
    logprobs: Tensor  # f32[N] recorded while sampling
    advantages: Tensor  # f32[N]
    weights: Tensor  # f32[N] fixed before packing; a step's update is sum(weights * loss)
    temperature: Tensor  # f32[N] at which the token was sampled; the trainer applies it too
    versions: Tensor  # i64[N]
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # f32[N] by name
    row_tokens: int = 0  # tokens before sharing, for the log
    slots: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)  # row index -> i64[L], the slots of its tokens
    activations: Tensor | None = None  # [T, H] input of the first trainable layer, if known

    @property
    def size(self) -> int:
        """T, the unique tokens of this forest."""
        return int(self.tokens.shape[0])


PER_TOKEN = (
    "target", "row", "turn", "trajectory", "group", "attempt",
    "logprobs", "advantages", "weights", "temperature", "versions",
)  # fmt: skip
"""The fields of a Batch that are [N], except `source` and the extras."""


def join(batches: Sequence[Batch]) -> Batch:
    """Join forests side by side into one batch, keeping only the extras that all of them have.

    Activations and slots are dropped.
    """
    begins = [0, *accumulate(batch.size for batch in batches)]
    shifted = list(zip(batches, begins, strict=False))
    names = set.intersection(*(set(batch.extras) for batch in batches))
    joined: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in PER_TOKEN}
    return Batch(
        tokens=torch.cat([batch.tokens for batch in batches]),
        positions=torch.cat([batch.positions for batch in batches]),
        subtree_end=torch.cat([batch.subtree_end + begin for batch, begin in shifted]),
        trees=tuple((a + begin, b + begin) for batch, begin in shifted for a, b in batch.trees),
        source=torch.cat([batch.source + begin for batch, begin in shifted]),
        extras={name: torch.cat([batch.extras[name] for batch in batches]) for name in sorted(names)},
        row_tokens=sum(batch.row_tokens for batch in batches),
        **joined,
    )
