"""ARPO's advantage, which averages the branches' advantages on tokens that they share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.lineage import common
from turnstile.credit.stats import F64, Eps, Flags, Of, Scale, group_rewards, normaliser
from turnstile.types import Group


def branch(
    groups: Sequence[Group],
    scores: Scores,
    *,
    of: Of = "total",
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_n = mean of A_j over the trajectories j of the group that contain token n (ARPO, arXiv 2507.19849).

    A_j is the advantage of `grpo`; `Trajectory.parent` says where a branch left its parent. This is the paper's hard
    estimate. Its soft estimate gives every branch its own advantage on shared tokens too, which is `grpo` itself. The
    two are equal in a group without branches.

    Statistics are float64 over trajectories in the baseline. Raises TrainingError if a reward is not finite.
    """
    normalise = normaliser("branch", scale, ddof=ddof, eps=eps)
    advantages: Advantages = []
    for group, group_scores in zip(groups, scores, strict=True):
        m = group_rewards(group, group_scores, of)
        advantages += _shared_means(group, normalise(m.values, m.in_baseline), m.in_baseline, m.in_gradient)
    return advantages


def _shared_means(group: Group, values: F64, in_baseline: Flags, in_gradient: Flags) -> Advantages:
    shared = common(group)
    advantages: Advantages = []
    for i, trajectory in enumerate(group.trajectories):
        turns = []
        for t, turn in enumerate(trajectory.turns):
            n = len(turn.completion.token_ids)
            total, holders = np.zeros(n), np.zeros(n)
            for j in np.flatnonzero(in_baseline):
                until, token = shared[i][j]
                held = n if until > t else token if until == t else 0
                total[:held] += values[j]
                holders[:held] += 1
            mean = np.where(holders > 0, total / np.maximum(holders, 1), values[i])
            turns.append((mean if in_gradient[i] else np.zeros(n)).astype(np.float32))
        advantages.append(turns)
    return advantages
