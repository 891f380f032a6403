"""Pairs of trajectories of one group, for pairwise losses.

Preferences come from the advantages: a trajectory's score is the mean advantage of its tokens, so any reward and credit
that distinguish a group's trajectories (`grpo`, `rloo`) make pairs. Groups are never mixed. Tokens of weight 0 do not
count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.base import EQUAL
from turnstile.losses.ratio import LIMIT
from turnstile.losses.units import sum_within


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryPairs:
    """M trajectories of a batch and their pairs. Only `counted` tokens contribute to a trajectory's sums."""

    index: Tensor  # i64[N] each token's trajectory
    counted: Tensor  # bool[N]
    score: Tensor  # f64[M] mean advantage
    same: Tensor  # bool[M, M] two different trajectories of the same group

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [N] over each trajectory's counted tokens, f64[M]."""
        return sum_within(values, self.index, self.counted.double())

    def better(self) -> Tensor:
        """Return bool[M, M], true if the first is of the same group as the second and scored higher."""
        return self.same & (self.score[:, None] - self.score[None, :] > EQUAL)

    def informative(self) -> Tensor:
        """Return bool[M, M], true for pairs within a group in which not all scores are equal."""
        better = self.better()
        apart = (better | better.T).any(1)
        return self.same & apart[:, None] & apart[None, :]

    def spread(self, loss: Tensor, slope: Tensor, logprobs: Tensor) -> Tensor:
        """Return, for each token, the loss of its trajectory: [M] -> [N].

        Its derivative with respect to the token's log-probability is `slope` [M], or 0 if the token is not counted.
        """
        move = torch.where(self.counted, logprobs - logprobs.detach(), 0)
        return loss.to(logprobs.dtype)[self.index] + slope.to(logprobs.dtype)[self.index] * move


def trajectory_pairs(batch: Batch, *, first_turn: bool = False) -> TrajectoryPairs:
    """Return the trajectories of a batch and their pairs.

    With `first_turn`, only the tokens of each trajectory's first turn in the batch are counted.
    """
    trajectories, index = torch.unique(batch.trajectory, return_inverse=True)
    counted = batch.weights != 0
    if first_turn:
        last = batch.turn.new_full((len(trajectories),), torch.iinfo(torch.int64).max)
        begin = last.scatter_reduce(0, index, batch.turn, "amin")
        counted = counted & (batch.turn == begin[index])
    weights = counted.double()
    sizes = sum_within(torch.ones_like(batch.advantages), index, weights)
    group = batch.group.new_zeros(len(trajectories)).scatter(0, index, batch.group)
    has_tokens = sizes > 0
    same = (group[:, None] == group[None, :]) & has_tokens[:, None] & has_tokens[None, :]
    same = same & ~torch.eye(len(trajectories), dtype=torch.bool, device=same.device)
    score = sum_within(batch.advantages, index, weights) / sizes.clamp(min=1)
    return TrajectoryPairs(index=index, counted=counted, score=score, same=same)


def log_ratio_to(anchor_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return log pi - log anchor at each token [N], without a gradient, clamped to [-LIMIT, LIMIT]."""
    return (logprobs.detach() - anchor_logprobs).clamp(-LIMIT, LIMIT)


def mean_over_pairs(values: Tensor, pairs: Tensor) -> Tensor:
    """Return, for each first member, the mean of `values` [M, M] over its pairs, f64[M]; 0 if it has none."""
    return torch.where(pairs, values, 0).sum(1) / pairs.sum(1).clamp(min=1)
