"""EMPG's advantage, which is scaled by how certain the policy was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import EQUAL, Advantages, Scores
from turnstile.credit.invariants import WHOLE_STEP, at, declare
from turnstile.credit.stats import F64, Eps, Of, Scale, centred, check_range, normaliser, relative
from turnstile.credit.turns import turns_of
from turnstile.types import Group


@declare(
    at({3: WHOLE_STEP, 7: "the second term praises what leads to sure turns"}),
    at({3: WHOLE_STEP}, zeta=0.0),
)
def empg(
    groups: Sequence[Group],
    scores: Scores,
    *,
    k: float = 1.0,
    k_future: float = 1.0,
    zeta: float = 0.1,
    of: Of = "total",
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = A_i g(H_t) + zeta f(H_{t+1}), then centred over the step (EMPG, arXiv 2509.09265).

    A_i is the advantage of `grpo`. H_t is the mean entropy of the turn's tokens, scaled to [0, 1] by the minimum and
    maximum of the step. g(H) = exp(-k H) / mean exp(-k H) gives confident turns more weight and uncertain turns less,
    without changing the average weight. f(H) = exp(-k_future H) rewards a turn that leads to a confident one; it is 0
    for the last turn. All means are over the step's turns that count.

    Computed in float64. Needs the entropies of sampled tokens. Equal rewards do not give 0, because the second term
    remains. Raises TrainingError if entropies are missing or a reward is not finite.
    """
    check_range("empg", 0.0, np.inf, k=k, k_future=k_future, zeta=zeta)
    step = turns_of(groups, scores)
    own = relative("empg", groups, scores, normaliser("empg", scale, ddof=ddof, eps=eps), of=of)[step.trajectory]
    takes_part = (step.in_baseline | step.in_gradient) & step.valued
    counted = step.in_baseline & step.valued
    if not counted.any():
        return step.to_tokens(np.zeros_like(own))
    entropies: F64 = np.zeros_like(own)
    entropies[takes_part] = [values.mean() for values in step.entropies("empg", takes_part)]
    low, high = entropies[counted].min(), entropies[counted].max()
    unsure = (entropies - low) / (high - low) if high - low >= EQUAL else np.zeros_like(entropies)
    weights = np.exp(-k * unsure)
    ahead = np.where(step.last, 0.0, np.exp(-k_future * np.roll(unsure, -1)))
    return step.to_tokens(centred(own * weights / weights[counted].mean() + zeta * ahead, counted))
