"""Leave-one-out advantages, which compare each attempt with the mean of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import Advantages, Scores, to_tokens
from turnstile.credit.invariants import at, declare
from turnstile.credit.stats import Of, check_knob, check_scores, flat, group_rewards
from turnstile.types import Group


@declare(at(), at(of="outcome"))
def rloo(groups: Sequence[Group], scores: Scores, *, of: Of = "total") -> Advantages:
    """A_i = S_i - mean_{j != i} S_j within the group, given to every token of attempt i.

    This is RLOO (arXiv 2402.14740), which LOOP (arXiv 2502.01600) uses for multi-turn agents. `of`: the composed total
    S_i or the outcome R_i alone. The baseline of an attempt never contains its own reward, so the gradient is unbiased.

    Statistics are float64 over trajectories in the baseline. A group with fewer than two of them, or whose rewards lie
    within 1e-8, gets exactly 0. Raises TrainingError if a reward is not finite.
    """
    check_knob("rloo", "of", of, ("total", "outcome"))
    check_scores(groups, scores)
    advantages: Advantages = []
    for group, group_scores in zip(groups, scores, strict=True):
        m = group_rewards(group, group_scores, of)
        values = np.zeros_like(m.values)
        if not flat(m.values, m.in_baseline):
            # for a trajectory outside the baseline, all trajectories in it are "the others"
            others = m.in_baseline.sum() - m.in_baseline
            sums = m.values[m.in_baseline].sum() - np.where(m.in_baseline, m.values, 0.0)
            values = m.values - sums / others
        advantages += to_tokens(group, np.where(m.in_gradient, values, 0.0).tolist())
    return advantages
