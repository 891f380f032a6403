"""REINFORCE++'s advantage, which normalises token returns over all tokens of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import LENGTHS, WHOLE_STEP, at, declare
from turnstile.credit.stats import F64, Eps, check_knob, check_range, group_rewards
from turnstile.credit.turns import Turns, turns_of
from turnstile.types import Group


@declare(
    at({3: WHOLE_STEP}),
    at({3: WHOLE_STEP}, baseline="group"),
    at({3: WHOLE_STEP, 7: LENGTHS}, gamma=0.9),
)
def reinforce_pp(
    groups: Sequence[Group],
    scores: Scores,
    *,
    gamma: float = 1.0,
    baseline: Literal["none", "group"] = "none",
    eps: Eps = 1e-8,
) -> Advantages:
    """A_n = (G_n - mean) / (std + eps) over all trained tokens n of the step (REINFORCE++, arXiv 2501.03262).

    G_n = r_n + gamma G_{n+1} along the trained tokens only. A step reward falls on the last token of its turn, and the
    outcome on the very last token. Observations and untrained turns take no part. `baseline = "group"` first subtracts
    the group's mean total from every outcome (the paper's REINFORCE++-baseline, for tasks of unequal difficulty). The
    paper puts the KL to a reference into the reward; here it is a regulariser (`losses/kl.py`).

    Mean and std (ddof 0) are float64 over the tokens of trajectories in the baseline; if their returns lie within 1e-8,
    the result is exactly 0. Raises TrainingError if a reward is not finite.
    """
    check_knob("reinforce_pp", "baseline", baseline, ("none", "group"))
    check_range("reinforce_pp", 0.0, 1.0, gamma=gamma)
    step = turns_of(groups, scores)
    if baseline == "group":
        step = replace(step, outcomes=step.outcomes - _means(groups, scores)[step.group])
    returns = token_returns(step, gamma)
    return step.split(step.over_tokens(returns, "std", eps, among=step.valued))


def token_returns(step: Turns, gamma: float) -> list[F64]:
    """Return the discounted return of every trained token, [T] -> f64[n].

    All tokens of an untrained turn get the return at the end of the turn.
    """
    found: list[F64] = []
    ahead, discounted = 0.0, False
    trained = step.valued
    for place in range(len(step.turns) - 1, -1, -1):
        n = len(step.turns[place].completion.token_ids)
        if step.last[place]:
            ahead, discounted = step.outcomes[place], False
        if trained[place] and discounted:  # a trained token follows
            ahead *= gamma
        ahead += step.rewards[place]  # on the last token of the turn
        if not trained[place]:
            found.append(np.full(n, ahead))
            continue
        found.append(ahead * gamma ** np.arange(n - 1, -1, -1, dtype=np.float64))
        ahead *= gamma ** (n - 1)
        discounted = True
    return found[::-1]


def _means(groups: Sequence[Group], scores: Scores) -> F64:
    """Return the mean total of each group's trajectories in the baseline; 0 for a group without any."""
    found = [group_rewards(group, group_scores, "total") for group, group_scores in zip(groups, scores, strict=True)]
    return np.array([m.values[m.in_baseline].mean() if m.in_baseline.any() else 0.0 for m in found], dtype=np.float64)
