"""Rows to prefix trees: what several rows begin with is computed once.

Rows are put in lexicographic order of their tokens, so that rows with a common prefix are neighbours and the
longest common prefix with the row before tells where each row branches off. Writing each row's private part
in that order *is* the depth-first layout.
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
"""Tokens that a CPU computes at once where nothing is gained by more: fewer waste its kernels, more its caches."""


def pack_prefix_trees(
    rows: Sequence[Row],
    weights: Sequence[F32],
    *,
    budget: int,
    device: torch.device | str = "cpu",
    share: bool = True,
    trunks: Sequence[Tensor] | None = None,
) -> list[Batch]:
    """Rows and their tokens' weights f32[L] as forests of at most `budget` unique tokens each.

    A tree over the budget is cut between rows and its trunk repeated, where that repeats the least; a row longer
    than the budget stands alone. On a CPU forests are smaller than the budget where that repeats nothing.
    `share=False` plants every row as a tree of its own (plain packing). `trunks` are the rows' known trunk
    activations [L', H]; they may end early, but not before what the row's last trained token depends on.
    """
    order = sorted(range(len(rows)), key=lambda r: rows[r].token_ids.tolist())
    tokens = [rows[r].token_ids for r in order]
    commons = [0, *(_common(*pair) if share else 0 for pair in itertools.pairwise(tokens))]
    forests: list[Batch] = []
    best_size = min(budget, CPU_TOKENS) if torch.device(device).type == "cpu" else budget
    for begin, end in _bins([len(each) for each in tokens], commons, budget, best_size):
        plot = _Plot()
        for i in range(begin, end):
            plot.add(order[i], tokens[i], commons[i] if i > begin else 0)
        forests.append(_batch(plot, rows, weights, torch.device(device), trunks))
    return forests


def _common(one: I32, other: I32) -> int:
    """How many leading tokens are the same."""
    short = min(len(one), len(other))
    different = np.flatnonzero(one[:short] != other[:short])
    return int(different[0]) if len(different) else short


def _bins(lengths: Sequence[int], commons: Sequence[int], budget: int, best_size: int) -> list[tuple[int, int]]:
    """Neighbours of at most `budget` unique tokens, or one row, as (begin, end): so that the fewest tokens are
    computed again in another bin (row i shares `commons[i]` with the one before), and then so that bins are near
    `best_size`."""
    best = [((0, 0), 0)]  # of the first n rows: (tokens again, how far from the best size), where the last bin begins
    for end in range(1, len(lengths) + 1):
        size, choices = 0, []
        for begin in range(end - 1, -1, -1):
            size += lengths[begin] - (commons[begin + 1] if begin + 1 < end else 0)
            if size > budget and begin + 1 < end:
                break
            again, far = best[begin][0]
            choices.append(((again + commons[begin], far + size**2 + best_size**2), begin))
        best.append(min(choices))
    found, end = [], len(lengths)
    while end:
        found.append((best[end][1], end))
        end = best[end][1]
    return found[::-1]


@dataclass
class _Plot:
    """A forest that grows: the slots of each member row, and where subtrees and trees end so far."""

    members: list[int] = field(default_factory=list)
    slots: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    tokens: list[I32] = field(default_factory=list)
    positions: list[NDArray[np.int64]] = field(default_factory=list)
    ends: list[tuple[NDArray[np.int64], int]] = field(default_factory=list)  # (closed slots, their subtree's end)
    roots: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, member: int, tokens: I32, common: int) -> None:
        private = np.arange(self.size, self.size + len(tokens) - common, dtype=np.int64)
        trunk = np.empty(0, np.int64)
        if self.members:
            before = self.slots[self.members[-1]]
            trunk = before[:common]
            self.ends.append((before[common:], self.size))
        if common == 0:
            self.roots.append(self.size)
        self.tokens.append(tokens[common:])
        self.positions.append(np.arange(common, len(tokens), dtype=np.int64))
        self.slots[member] = np.concatenate([trunk, private])
        self.members.append(member)
        self.size += len(private)

    def subtree_end(self) -> NDArray[np.int64]:
        end = np.full(self.size, self.size, dtype=np.int64)
        for slots, at in self.ends:
            end[slots] = at
        return end


def _batch(
    plot: _Plot, rows: Sequence[Row], weights: Sequence[F32], device: torch.device, trunks: Sequence[Tensor] | None
) -> Batch:
    """The tensors of a finished plot. Trained tokens stay in the order of the step's rows."""
    members = sorted(plot.members)
    trained = {r: np.flatnonzero(rows[r].loss_mask) for r in members}
    origins = {origin: i for i, origin in enumerate(dict.fromkeys(row.origin for row in rows))}
    groups = {group: i for i, group in enumerate(dict.fromkeys(row.origin[0] for row in rows))}

    def gather(name: str) -> Tensor:
        return _tensor(np.concatenate([getattr(rows[r], name)[trained[r]] for r in members]), device)

    def spread(values: Sequence[float], dtype: type) -> Tensor:
        parts: list[np.ndarray] = [np.full(len(trained[r]), v, dtype) for r, v in zip(members, values, strict=True)]
        return _tensor(np.concatenate(parts), device)

    extras = set.intersection(*(set(rows[r].extras) for r in members))
    return Batch(
        tokens=_tensor(np.concatenate(plot.tokens).astype(np.int64), device),
        positions=_tensor(np.concatenate(plot.positions), device),
        subtree_end=_tensor(plot.subtree_end(), device),
        trees=tuple(zip(plot.roots, [*plot.roots[1:], plot.size], strict=True)),
        source=_tensor(np.concatenate([plot.slots[r][trained[r] - 1] for r in members]), device),
        target=gather("token_ids").long(),
        row=spread(members, np.int64),
        turn=gather("turn_ids").long(),
        trajectory=spread([origins[rows[r].origin] for r in members], np.int64),
        group=spread([groups[rows[r].origin[0]] for r in members], np.int64),
        attempt=spread([rows[r].origin[1] for r in members], np.int64),
        logprobs=gather("logprobs"),
        advantages=gather("advantages"),
        weights=_tensor(np.concatenate([weights[r][trained[r]] for r in members]), device),
        temperature=spread([rows[r].temperature for r in members], np.float32),
        versions=gather("versions").long(),
        extras={
            name: _tensor(np.concatenate([rows[r].extras[name][trained[r]] for r in members]), device)
            for name in sorted(extras)
        },
        row_tokens=sum(len(rows[r].token_ids) for r in members),
        slots=plot.slots,
        trunk=None if trunks is None else _trunk(plot, trunks),
    )


def _trunk(plot: _Plot, trunks: Sequence[Tensor]) -> Tensor:
    """The rows' trunks by slot; zeros for the last tokens of rows, on which nothing depends."""
    first = trunks[plot.members[0]]
    whole = torch.zeros(plot.size, first.shape[1], dtype=first.dtype, device=first.device)
    for member in plot.members:
        known = trunks[member]
        whole[torch.from_numpy(plot.slots[member][: len(known)])] = known
    return whole


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
