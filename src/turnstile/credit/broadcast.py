"""Flow-GRPO's advantage, which treats each turn as a sample with its trajectory's outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import at, declare
from turnstile.credit.stats import Eps, Of, Scale, check_knob, normaliser, relative
from turnstile.credit.turns import turns_of
from turnstile.types import Group


@declare(at(), at(of="total", over="turns"))
def broadcast(
    groups: Sequence[Group],
    scores: Scores,
    *,
    over: Literal["trajectories", "turns"] = "trajectories",
    of: Of = "outcome",
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = (R_i - mean) / (std + eps), given to every turn t (Flow-GRPO of AgentFlow, arXiv 2510.05592).

    `over` selects the samples of mean and std. With `trajectories`, as in the paper, each trajectory of the group
    counts once. The values are then those of `grpo`, and turns become the samples through the weights `turn`. With
    `turns`, a trajectory of K turns counts K times. The two agree if all trajectories have equally many turns. `of`:
    the outcome R_i, or the composed total.

    Statistics are float64 over trajectories in the baseline. Raises TrainingError if a reward is not finite.
    """
    check_knob("broadcast", "over", over, ("trajectories", "turns"))
    normalise = normaliser("broadcast", scale, ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    if over == "trajectories":
        return step.to_tokens(relative("broadcast", groups, scores, normalise, of=of)[step.trajectory])
    check_knob("broadcast", "of", of, ("total", "outcome"))
    values = step.outcomes
    if of == "total":
        values = values + np.bincount(step.trajectory, weights=step.rewards)[step.trajectory]
    return step.to_tokens(step.within(step.group.tolist(), values, normalise))
