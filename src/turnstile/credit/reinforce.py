"""REINFORCE's advantage, which compares each attempt with the mean of the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores, to_tokens
from turnstile.credit.invariants import NO_BASELINE, WHOLE_STEP, at, declare
from turnstile.credit.stats import Of, centred, check_knob, check_scores, group_rewards
from turnstile.types import Group


@declare(at({3: WHOLE_STEP}), at({7: NO_BASELINE}, baseline="none"))
def reinforce(
    groups: Sequence[Group],
    scores: Scores,
    *,
    of: Of = "total",
    baseline: Literal["batch", "none"] = "batch",
) -> Advantages:
    """A_i = S_i - b, given to every token of attempt i (Williams 1992).

    `baseline`: `batch` is the mean over all attempts of the step, whatever their task; `none` is b = 0, the plain
    score-function estimator. `of`: the composed total S_i or the outcome R_i alone.

    Statistics are float64 over trajectories in the baseline. The batch baseline gives exactly 0 if the step has fewer
    than two of them, or if their rewards lie within 1e-8. Raises TrainingError if a reward is not finite.
    """
    check_knob("reinforce", "of", of, ("total", "outcome"))
    check_knob("reinforce", "baseline", baseline, ("batch", "none"))
    check_scores(groups, scores)
    found = [group_rewards(group, group_scores, of) for group, group_scores in zip(groups, scores, strict=True)]
    values = np.concatenate([m.values for m in found]) if found else np.zeros(0)
    if baseline == "batch":
        values = centred(
            values, np.concatenate([m.in_baseline for m in found]) if found else np.zeros(0, dtype=np.bool_)
        )
    advantages: Advantages = []
    for group, m in zip(groups, found, strict=True):
        own, values = values[: len(m.values)], values[len(m.values) :]
        advantages += to_tokens(group, np.where(m.in_gradient, own, 0.0).tolist())
    return advantages
