"""Pack rows into prefix trees, so that a prefix that several rows share is computed once.

Rows are sorted lexicographically by token, so rows with a common prefix are adjacent, and each row branches off where
its longest common prefix with the previous row ends. Concatenating the rows' private parts in this order yields the
depth-first layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.types import F32, I32, Row

CPU_TOKENS = 2048
"""Size of a forest at which a CPU is most efficient: fewer tokens underuse its kernels, more overflow its caches."""


def pack_prefix_trees(
    rows: Sequence[Row],
    weights: Sequence[F32],
    *,
    budget: int,
    device: torch.device | str = "cpu",
    share: bool = True,
    activations: Sequence[Tensor] | None = None,
) -> list[Batch]:
    """Pack rows, with weights f32[L] for their tokens, into forests of at most `budget` unique tokens each.

    A tree above the budget is split between rows, at the point that repeats the fewest tokens of its shared prefix; a
    row longer than the budget gets a forest of its own. On a CPU, forests are close to `CPU_TOKENS` tokens as far as
    that repeats no tokens. With `share=False` every row is a tree of its own (plain packing). `activations` are the
    rows' known activations [L', H]; they may end early, but not before tokens that the row's last trained token depends
    on.
    """
    order = sorted(range(len(rows)), key=lambda r: rows[r].token_ids.tolist())
    tokens = [rows[r].token_ids for r in order]
    commons = [0, *(_common_length(*pair) if share else 0 for pair in itertools.pairwise(tokens))]
    forests: list[Batch] = []
    best_size = min(budget, CPU_TOKENS) if torch.device(device).type == "cpu" else budget
    for begin, end in _split_into_bins([len(each) for each in tokens], commons, budget, best_size):
        builder = _ForestBuilder()
        for i in range(begin, end):
            builder.add(order[i], tokens[i], commons[i] if i > begin else 0)
        forests.append(_build_batch(builder, rows, weights, torch.device(device), activations))
    return forests


def _common_length(one: I32, other: I32) -> int:
    """Return how many leading tokens two rows have in common."""
    short = min(len(one), len(other))
    different = np.flatnonzero(one[:short] != other[:short])
    return int(different[0]) if len(different) else short


def _split_into_bins(
    lengths: Sequence[int], commons: Sequence[int], budget: int, best_size: int
) -> list[tuple[int, int]]:
    """Split sorted rows into (begin, end) bins of at most `budget` unique tokens, or of one row.

    Row i shares `commons[i]` tokens with the row before it. Dynamic programming first minimises the tokens that are
    repeated across bins, and then the sum of size^2 + best_size^2 over bins, which favours sizes close to `best_size`.
    """
    best = [((0, 0), 0)]  # for the first n rows: (repeated tokens, size penalty), begin of the last bin
    for end in range(1, len(lengths) + 1):
        size, choices = 0, []
        for begin in range(end - 1, -1, -1):
            size += lengths[begin] - (commons[begin + 1] if begin + 1 < end else 0)
            if size > budget and begin + 1 < end:
                break
            repeated, penalty = best[begin][0]
            choices.append(((repeated + commons[begin], penalty + size**2 + best_size**2), begin))
        best.append(min(choices))
    bins, end = [], len(lengths)
    while end:
        bins.append((best[end][1], end))
        end = best[end][1]
    return bins[::-1]


@dataclass
class _ForestBuilder:
    """A forest under construction, to which rows are added in sorted order."""

    row_indices: list[int] = field(default_factory=list)
    slots: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    tokens: list[I32] = field(default_factory=list)
    positions: list[NDArray[np.int64]] = field(default_factory=list)
    ends: list[tuple[NDArray[np.int64], int]] = field(default_factory=list)  # (closed slots, their subtree's end)
    roots: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, row_index: int, tokens: I32, common: int) -> None:
        """Add a row that shares its first `common` tokens with the row before it."""
        private = np.arange(self.size, self.size + len(tokens) - common, dtype=np.int64)
        shared = np.empty(0, np.int64)
        if self.row_indices:
            before = self.slots[self.row_indices[-1]]
            shared = before[:common]
            self.ends.append((before[common:], self.size))
        if common == 0:
            self.roots.append(self.size)
        self.tokens.append(tokens[common:])
        self.positions.append(np.arange(common, len(tokens), dtype=np.int64))
        self.slots[row_index] = np.concatenate([shared, private])
        self.row_indices.append(row_index)
        self.size += len(private)

    def subtree_end(self) -> NDArray[np.int64]:
        """Return the end of each slot's subtree, i64[T]."""
        end = np.full(self.size, self.size, dtype=np.int64)
        for slots, at in self.ends:
            end[slots] = at
        return end


def _build_batch(
    builder: _ForestBuilder, rows: Sequence[Row], weights: Sequence[F32], device: torch.device,
    activations: Sequence[Tensor] | None,
) -> Batch:  # fmt: skip
    """Return the batch of a finished forest, with trained tokens in the order of `rows`."""
    row_indices = sorted(builder.row_indices)
    trained = {r: np.flatnonzero(rows[r].loss_mask) for r in row_indices}
    origins = {origin: i for i, origin in enumerate(dict.fromkeys(row.origin for row in rows))}
    groups = {group: i for i, group in enumerate(dict.fromkeys(row.origin[0] for row in rows))}

    def gather(name: str) -> Tensor:
        return _to_tensor(np.concatenate([getattr(rows[r], name)[trained[r]] for r in row_indices]), device)

    def spread(values: Sequence[float], dtype: type) -> Tensor:
        parts: list[np.ndarray] = [np.full(len(trained[r]), v, dtype) for r, v in zip(row_indices, values, strict=True)]
        return _to_tensor(np.concatenate(parts), device)

    extras = set.intersection(*(set(rows[r].extras) for r in row_indices))
    return Batch(
        tokens=_to_tensor(np.concatenate(builder.tokens).astype(np.int64), device),
        positions=_to_tensor(np.concatenate(builder.positions), device),
        subtree_end=_to_tensor(builder.subtree_end(), device),
        trees=tuple(zip(builder.roots, [*builder.roots[1:], builder.size], strict=True)),
        source=_to_tensor(np.concatenate([builder.slots[r][trained[r] - 1] for r in row_indices]), device),
        target=gather("token_ids").long(),
        row=spread(row_indices, np.int64),
        turn=gather("turn_ids").long(),
        trajectory=spread([origins[rows[r].origin] for r in row_indices], np.int64),
        group=spread([groups[rows[r].origin[0]] for r in row_indices], np.int64),
        attempt=spread([rows[r].origin[1] for r in row_indices], np.int64),
        logprobs=gather("logprobs"),
        advantages=gather("advantages"),
        weights=_to_tensor(np.concatenate([weights[r][trained[r]] for r in row_indices]), device),
        temperature=spread([rows[r].temperature for r in row_indices], np.float32),
        versions=gather("versions").long(),
        extras={
            name: _to_tensor(np.concatenate([rows[r].extras[name][trained[r]] for r in row_indices]), device)
            for name in sorted(extras)
        },
        row_tokens=sum(len(rows[r].token_ids) for r in row_indices),
        slots=builder.slots,
        activations=None if activations is None else _scatter_activations(builder, activations),
    )


def _scatter_activations(builder: _ForestBuilder, activations: Sequence[Tensor]) -> Tensor:
    """Return the rows' activations by slot, [T, H].

    Slots beyond a row's known activations, which no trained token depends on, hold zeros.
    """
    first = activations[builder.row_indices[0]]
    whole = torch.zeros(builder.size, first.shape[1], dtype=first.dtype, device=first.device)
    for row_index in builder.row_indices:
        known = activations[row_index]
        whole[torch.from_numpy(builder.slots[row_index][: len(known)])] = known
    return whole


def _to_tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
