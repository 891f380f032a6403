"""IGPO's advantage, which normalises turn rewards and outcomes together and then sums them from each turn on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import at, declare
from turnstile.credit.stats import Eps, Scale, check_range, normaliser
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
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = sum_{k >= t} gamma^(k-t) Z_{i,k}, with Z the normalised turn rewards (IGPO, arXiv 2510.14967).

    The reward of a turn is r_{i,k}, the information gain in the paper; that of the last turn is r_{i,K} + R_i. Z
    normalises the rewards of all turns of the group together, so turns of every index share one mean and deviation. An
    attempt with more turns sums more terms, so equal outcomes do not give 0. A group of one attempt does not give 0
    either, because its turns are compared with each other: a turn that earned more than the attempt's mean gets a
    positive Z. If turns have rewards, this separates good turns from bad ones. With an outcome alone, it only rewards
    or penalises a turn for being late.

    Statistics are float64 over trajectories in the baseline. Raises TrainingError if a reward is not finite.
    """
    check_range("igpo", 0.0, 1.0, gamma=gamma)
    step = turns_of(groups, scores)
    rewards = step.rewards + np.where(step.last, step.outcomes, 0.0)
    normalise = normaliser("igpo", scale, ddof=ddof, eps=eps)
    return step.to_tokens(step.sums_to_go(step.within(step.group.tolist(), rewards, normalise), gamma))
