"""Credit for rewritten contexts, where all segments of a trajectory share its advantage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import at, declare
from turnstile.credit.stats import Eps, check_range, equal, group_rewards, normaliser
from turnstile.credit.turns import turns_of
from turnstile.types import Group


@declare(at(), at(process=1.0, low=-20.0, high=20.0))
def segments(
    groups: Sequence[Group],
    scores: Scores,
    *,
    process: float = 0.0,
    low: float = 0.0,
    high: float = 1.0,
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = (clip(R_i + process r_{i,t}, low, high) - mean_j R_j) / (std_j R_j + eps).

    A trajectory whose context was summarised or folded becomes several training rows, one per segment. All segments
    share the advantage of their trajectory, and the statistics are over trajectories, not segments (SUPO, arXiv
    2510.06727). This is `process = 0`, without clipping. With `process > 0` each turn's step reward is added to the
    outcome, whereas the group's statistics are those of outcomes alone (FoldGRPO of Context-Folding, arXiv 2510.11967,
    where outcomes and their sum with the process reward lie within [0, 1]; `low` and `high` are that range).

    Statistics are float64 over trajectories in the baseline. If the outcomes lie within 1e-8, only the process rewards
    remain, undivided. Raises TrainingError if a reward is not finite.
    """
    check_range("segments", 0.0, np.inf, process=process)
    normaliser("segments", "std", ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    values = step.outcomes
    if process > 0.0:
        values = np.clip(step.outcomes + process * step.rewards, low, high)
    result = np.zeros_like(values)
    for place, (group, group_scores) in enumerate(zip(groups, scores, strict=True)):
        m = group_rewards(group, group_scores, "outcome")
        outcomes, turns = m.values[m.in_baseline], step.group == place
        even = equal(outcomes)
        if len(outcomes) > 1 and (process > 0.0 or not even):
            if even:
                result[turns] = values[turns] - step.outcomes[turns]  # exactly 0 except for process rewards
            else:
                result[turns] = (values[turns] - outcomes.mean()) / (outcomes.std(ddof=ddof) + eps)
    return step.to_tokens(result)
