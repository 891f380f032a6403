"""Group-relative advantages, which compare each attempt with the mean of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores, to_tokens
from turnstile.credit.invariants import WHOLE_STEP, at, declare
from turnstile.credit.stats import Eps, Of, centred, check_knob, check_scores, equal, group_rewards, standardised
from turnstile.types import Group


@declare(at(), at(of="outcome", ddof=0), at(scale="none"), at({3: WHOLE_STEP}, scale="batch_std"))
def grpo(
    groups: Sequence[Group],
    scores: Scores,
    *,
    of: Of = "total",
    scale: Literal["group_std", "none", "batch_std"] = "group_std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_i = (S_i - mean) / (std + eps) within the group, given to every token of attempt i.

    `of`: the composed total S_i, or the outcome R_i alone. `scale`: `group_std` is GRPO (arXiv 2402.03300); `none`
    omits the division (Dr. GRPO, arXiv 2503.20783); `batch_std` divides by the standard deviation of the whole step's
    rewards (Lite PPO, arXiv 2508.08221). `ddof`: the GRPO paper does not specify it; public trainers use the unbiased
    variance, ddof = 1. `eps` is in units of reward; a larger one shrinks the advantages of groups whose rewards hardly
    differ.

    Statistics are float64 over trajectories in the baseline. A group with fewer than two of them, or whose rewards lie
    within 1e-8, gets exactly 0. Raises TrainingError if a reward is not finite.
    """
    check_knob("grpo", "of", of, ("total", "outcome"))
    check_knob("grpo", "scale", scale, ("group_std", "none", "batch_std"))
    check_knob("grpo", "ddof", ddof, (0, 1))
    check_scores(groups, scores)
    rewards = [group_rewards(group, group_scores, of) for group, group_scores in zip(groups, scores, strict=True)]
    divisor = 1.0
    if scale == "batch_std":
        counted = np.concatenate([group.values[group.in_baseline] for group in rewards]) if rewards else np.zeros(0)
        divisor = 1.0 if equal(counted) else float(counted.std(ddof=ddof)) + eps
    advantages: Advantages = []
    for group, m in zip(groups, rewards, strict=True):
        if scale == "group_std":
            values = standardised(m.values, m.in_baseline, ddof=ddof, eps=eps)
        else:
            values = centred(m.values, m.in_baseline) / divisor
        advantages += to_tokens(group, np.where(m.in_gradient, values, 0.0).tolist())
    return advantages
