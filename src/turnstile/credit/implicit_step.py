"""Credit from implicit process rewards, which are learned from outcomes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnstile.credit.base import Advantages, Scores, learned
from turnstile.credit.invariants import at, declare
from turnstile.credit.rloo import rloo
from turnstile.credit.stats import F64, Of, check_range
from turnstile.credit.turns import turns_of
from turnstile.types import Group

_PROCESS = "the process reward is a model's word, which need not agree with the outcomes"


@declare(at({7: _PROCESS}), at({7: _PROCESS}, omega=0.5, gamma=0.0))
@learned("reward_model", "turnstile.trainer.implicit:ImplicitReward")
def implicit_step(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    *,
    omega: float = 1.0,
    gamma: float = 1.0,
    of: Of = "outcome",
) -> Advantages:
    """A_{i,t} = R_i - mean_{j != i} R_j + omega sum_{k >= t} gamma^(k-t) (rho_{i,k} - mean_{j != i} rho_j).

    This is PRIME (arXiv 2502.01456), by turns instead of tokens. rho_{i,k} is beta log(phi / reference) summed over the
    tokens of turn k, and rho_j its mean over the turns of attempt j. Untrained turns take no part.

    phi is a language model whose log-ratio is trained to tell good attempts from bad ones. The log-ratio of a turn is
    then a reward for that turn, without any step labels. With `gamma = 0` each turn has only its own reward, as in
    iStar (OPRL, arXiv 2509.19199), which also divides by the group's deviation. That the leave-one-out means are over
    the attempts' mean rewards is PRIME as we remember it.

    Needs phi, which the trainer provides and trains in the same step (`[credit.reward_model]`). Turns that phi cannot
    judge yet have a reward near 0. While most attempts fail, that is more than most turns get, so a large
    `reward_model.beta` or `omega` drives the policy away from what it can do. PRIME, as we remember it, has beta = 0.05
    and drops tasks that nearly always fail. Statistics are float64 over trajectories in the baseline; a group with
    fewer than two of them gets 0. Equal outcomes do not give 0. Raises ConfigError if `aux["implicit"]` is missing,
    TrainingError if a reward is not finite.
    """
    check_range("implicit_step", 0.0, 1.0, gamma=gamma)
    check_range("implicit_step", 0.0, np.inf, omega=omega)
    whole = rloo(groups, scores, of=of)
    step = turns_of(groups, scores)
    by_token = step.token_predictions("implicit_step", aux, "implicit")
    rewards = np.array([own.sum() for own in by_token], dtype=np.float64)
    result = np.zeros_like(rewards)
    for group in range(len(groups)):
        turns = (step.group == group) & step.valued
        result[turns] = _above_others(rewards[turns], step.trajectory[turns], step.in_baseline[turns])
    credit = step.to_tokens(omega * step.sums_to_go(result, gamma))
    return [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(whole, credit, strict=True)]


def _above_others(rewards: F64, trajectory: Any, counted: Any) -> F64:
    """Return the rewards of one group's turns minus the mean of the other attempts' mean turn rewards.

    Returns 0 for the turns of an attempt without others.
    """
    result = np.zeros_like(rewards)
    means = {int(i): float(rewards[trajectory == i].mean()) for i in np.unique(trajectory[counted])}
    for i in np.unique(trajectory):
        others = [mean for j, mean in means.items() if j != i]
        if others:
            result[trajectory == i] = rewards[trajectory == i] - np.mean(others)
    return result
