"""IGPO's advantage: the rewards of turns and the outcome, normalised together, then summed to go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import at, declare
from turnstile.credit.stats import Scale, check_range, normaliser
from turnstile.credit.turns import turns_of
from turnstile.types import Group


@declare(at({7: "turns without a reward and the outcome are normalised together"}))
def igpo(
    groups: Sequence[Group],
    scores: Scores,
    *,
    gamma: float = 1.0,
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Advantages:
    """A_{i,t} = sum_{k >= t} gamma^(k-t) Z_{i,k}, Z the rewards of all turns of the group, normalised together
    (IGPO, arXiv 2510.14967).

    The reward of a turn is r_{i,k}, the information gain in the paper, and for the last one r_{i,K} + R_i. Turns
    of every index share one mean and deviation, so an attempt with more turns sums more terms: equal outcomes do not
    give 0. Nor does a group of one attempt, whose turns are compared with one another: what earned more than that
    attempt's mean turn is praised, which tells good turns from bad where turns have rewards, and where there is only
    the outcome praises or blames being late.

    Statistics in float64 over trajectories in the baseline. Raises TrainingError for a reward that is not finite.
    """
    check_range("igpo", 0.0, 1.0, gamma=gamma)
    step = turns_of(groups, scores)
    rewards = step.rewards + np.where(step.last, step.outcomes, 0.0)
    normalise = normaliser("igpo", scale, ddof=ddof, eps=eps)
    return step.to_tokens(step.sums_to_go(step.within(step.group.tolist(), rewards, normalise), gamma))
