"""Learn from what was kept, and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnstile.credit.base import Advantages, Scores, State, to_tokens
from turnstile.credit.stats import Of, check_knob, check_scores, members
from turnstile.types import Group


def accept(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    state: State,
    *,
    threshold: float = 0.5,
    of: Of = "outcome",
) -> tuple[Advantages, State]:
    """A_i = 1 where the reward reaches `threshold`, else 0, given to every token of attempt i.

    Rejection sampling as fine-tuning: RAFT (arXiv 2304.06767), expert iteration. With the loss `reinforce` the
    gradient is that of the log-likelihood of what was kept. There is no baseline: equal rewards above the
    threshold all give 1.

    `of`: the outcome R_i or the composed total S_i. Raises TrainingError for a reward that is not finite.
    """
    check_knob("accept", "of", of, ("total", "outcome"))
    check_scores(groups, scores)
    advantages: Advantages = []
    for group, group_scores in zip(groups, scores, strict=True):
        m = members(group, group_scores, of)
        advantages += to_tokens(group, np.where(m.learning & (m.values >= threshold), 1.0, 0.0).tolist())
    return advantages, state
