"""Turn-level advantages, which are discounted returns from each turn on, normalised among turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import LENGTHS, WHOLE_STEP, at, declare
from turnstile.credit.stats import Eps, Scale, check_knob, check_range, normaliser
from turnstile.credit.turns import turns_of
from turnstile.types import Group


@declare(
    at(),
    at(scale="none"),
    at({7: LENGTHS}, gamma=0.9),
    at({3: WHOLE_STEP}, among="batch"),
    at({3: WHOLE_STEP, 7: LENGTHS}, among="mixed", gamma=0.9),
)
def turn_return(
    groups: Sequence[Group],
    scores: Scores,
    *,
    gamma: float = 1.0,
    among: Literal["index", "batch", "mixed"] = "index",
    mix: float = 0.5,
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = normalised G_{i,t}, the discounted return from turn t on, given to every token of turn t.

    G_{i,t} = sum_{k >= t} gamma^(k-t) r_{i,k} + gamma^(K-t) R_i. `among` selects the turns to compare with: `index`,
    the turns of the group at the same turn index; `batch`, all turns of the step; `mixed`, mix * index + (1 - mix) *
    batch (MAPO, arXiv 2603.06194, combines a turn-level with a batch-level normalisation; the weight `mix` is ours).
    MARS (arXiv 2510.15414) estimates turn-level advantages in the same way; its normalisation by agent is `per_agent`.
    `scale = "none"` only centres.

    Statistics are float64 over trajectories in the baseline. A turn gets exactly 0 if there are no others to compare
    with, or if the returns compared lie within 1e-8. Raises TrainingError if a reward is not finite.
    """
    check_knob("turn_return", "among", among, ("index", "batch", "mixed"))
    check_range("turn_return", 0.0, 1.0, gamma=gamma, mix=mix)
    normalise = normaliser("turn_return", scale, ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    returns = step.returns(gamma)
    share = {"index": 1.0, "batch": 0.0, "mixed": mix}[among]
    result = np.zeros_like(returns)
    if share > 0.0:
        at_index = list(zip(step.group.tolist(), step.index.tolist(), strict=True))
        result += share * step.within(at_index, returns, normalise)
    if share < 1.0:
        result += (1.0 - share) * step.within([0] * len(returns), returns, normalise)
    return step.to_tokens(result)
