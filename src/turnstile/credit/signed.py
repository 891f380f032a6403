"""Positive and negative samples, each with a weight of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnstile.credit.base import Advantages, Scores, State, to_tokens
from turnstile.credit.stats import Of, check_knob, check_range, check_scores, members
from turnstile.types import Group


def signed(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    state: State,
    *,
    positive: float = 0.1,
    negative: float = 1.0,
    threshold: float = 0.5,
    of: Of = "outcome",
) -> tuple[Advantages, State]:
    """A_i = positive where the reward reaches `threshold`, else -negative, given to every token of attempt i
    (arXiv 2506.01347).

    `positive = 0` is negative sample reinforcement, which takes probability from what failed and lets it go where the
    policy would have put it anyway; `negative = 0` is positive sample reinforcement; the default is the paper's
    weighted REINFORCE. There is no baseline.

    `of`: the outcome R_i or the composed total S_i. Raises TrainingError for a reward that is not finite.
    """
    check_knob("signed", "of", of, ("total", "outcome"))
    check_range("signed", 0.0, np.inf, positive=positive, negative=negative)
    check_scores(groups, scores)
    advantages: Advantages = []
    for group, group_scores in zip(groups, scores, strict=True):
        m = members(group, group_scores, of)
        values = np.where(m.values >= threshold, positive, -negative)
        advantages += to_tokens(group, np.where(m.learning, values, 0.0).tolist())
    return advantages, state
