"""PPR's ReNorm, which calibrates process rewards by the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import NO_BASELINE, at, declare
from turnstile.credit.stats import Eps, Scale, check_knob, check_range, normaliser
from turnstile.credit.turns import turns_of
from turnstile.types import Group


@declare(
    at({7: "the outcome is in the reward of each turn, so attempts of more turns sum more of it"}),
    at(gamma=0.0, scale="none"),
    at(calibrate="product"),
    at({7: NO_BASELINE}, baseline="none"),
)
def normalised_process(
    groups: Sequence[Group],
    scores: Scores,
    *,
    calibrate: Literal["sum", "product", "none"] = "sum",
    middle: float = 0.5,
    gamma: float = 1.0,
    baseline: Literal["index", "none"] = "index",
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = normalised sum_{k >= t} gamma^(k-t) z_{i,k}, with z_{i,t} = (r_{i,t} - middle) + (R_i - middle).

    ReNorm of PPR, arXiv 2509.25598. With process rewards in [0, 1] and outcomes of 0 or 1, no step of a failed attempt
    has z above 0, no step of a successful one has z below 0, and z lies within [-1, 1] (at `middle = 0.5`).
    Descriptions and reviews of the paper say that every step gets the outcome, and that both are centred so that the
    signs agree; the formula is from memory. `calibrate` therefore has alternatives: `product` is z = R_i r_{i,t}, plus
    R_i at the last turn; `none` is z = r_{i,t}, plus R_i at the last turn, which is `turn_return`.

    The paper passes z to PPO with a critic. Here, `baseline = "index"` replaces the critic by the group's turns at the
    same index (centred or, with `scale = "std"`, normalised). `none` has no baseline, because z is already centred. The
    outcome counts once per turn, so longer attempts sum more of it. This biases the gradient if the policy decides how
    long an attempt lasts (`walk` in the lab). With `gamma = 0` each turn has only its own z.

    Statistics are float64 over trajectories in the baseline. Raises TrainingError if a reward is not finite.
    """
    check_knob("normalised_process", "calibrate", calibrate, ("sum", "product", "none"))
    check_knob("normalised_process", "baseline", baseline, ("index", "none"))
    check_range("normalised_process", 0.0, 1.0, gamma=gamma)
    normalise = normaliser("normalised_process", scale, ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    at_end = np.where(step.last, step.outcomes, 0.0)
    if calibrate == "sum":
        values = step.rewards + step.outcomes - 2 * middle
    elif calibrate == "product":
        values = step.rewards * step.outcomes + at_end
    else:
        values = step.rewards + at_end
    result = step.sums_to_go(values, gamma)
    if baseline == "index":
        at_index = list(zip(step.group.tolist(), step.index.tolist(), strict=True))
        result = step.within(at_index, result, normalise)
    return step.to_tokens(result)
