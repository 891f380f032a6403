"""An advantage estimator of one's own: each attempt against the median of its group."""

import numpy as np

from turnstile.credit.base import to_tokens
from turnstile.credit.stats import group_rewards


def above_median(groups, scores, *, scale: float = 1.0):
    """A_i = scale * (S_i - median of the group's totals), given to every token of attempt i."""
    advantages = []
    for group, group_scores in zip(groups, scores, strict=True):
        m = group_rewards(group, group_scores, "total")
        middle = np.median(m.values[m.in_baseline]) if m.in_baseline.any() else 0.0
        values = np.where(m.in_gradient, scale * (m.values - middle), 0.0)
        advantages += to_tokens(group, values.tolist())
    return advantages
