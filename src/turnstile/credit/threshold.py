"""RAFT and PSR/NSR, which reinforce samples at or above a reward threshold and suppress those below."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import Advantages, Scores, to_tokens
from turnstile.credit.invariants import KEPT, NO_BASELINE, at, declare
from turnstile.credit.stats import Of, check_knob, check_range, check_scores, group_rewards
from turnstile.types import Group


@declare(at({6: KEPT}), at({7: NO_BASELINE}, positive=0.1, negative=1.0))
def threshold(
    groups: Sequence[Group],
    scores: Scores,
    *,
    positive: float = 1.0,
    negative: float = 0.0,
    threshold: float = 0.5,
    of: Of = "outcome",
) -> Advantages:
    """A_i = positive if the reward reaches `threshold`, else -negative, given to every token of attempt i.

    The default is rejection-sampling fine-tuning: RAFT (arXiv 2304.06767), expert iteration. With the loss `reinforce`,
    the gradient is that of the log-likelihood of the samples that reach the threshold. `positive = 0.1, negative = 1`
    is the weighted REINFORCE of PSR/NSR (arXiv 2506.01347). `positive = 0, negative = 1` is its negative sample
    reinforcement, which takes probability from failures and redistributes it according to the policy's own preferences.
    There is no baseline, so equal rewards do not give 0.

    `of`: the outcome R_i or the composed total S_i. Raises TrainingError if a reward is not finite.
    """
    check_knob("threshold", "of", of, ("total", "outcome"))
    check_range("threshold", 0.0, np.inf, positive=positive, negative=negative)
    check_scores(groups, scores)
    below = 0.0 - negative  # not -negative, which is -0.0 for 0
    advantages: Advantages = []
    for group, group_scores in zip(groups, scores, strict=True):
        m = group_rewards(group, group_scores, of)
        values = np.where(m.values >= threshold, positive, below)
        advantages += to_tokens(group, np.where(m.in_gradient, values, 0.0).tolist())
    return advantages
