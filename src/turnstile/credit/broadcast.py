"""Flow-GRPO's credit: every turn is a sample of its own, with the outcome of its trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnstile.credit.base import Advantages, Scores, State
from turnstile.credit.stats import Of, Scale, check_knob, normaliser
from turnstile.credit.turns import turns_of
from turnstile.types import Group


def broadcast(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    state: State,
    *,
    of: Of = "outcome",
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> tuple[Advantages, State]:
    """A_{i,t} = (R_i - mean) / (std + eps) with mean and deviation over the turns of the group
    (AgentFlow's Flow-GRPO, arXiv 2510.05592).

    Every turn is one sample that carries the outcome of its trajectory, so a trajectory of K turns counts K times in
    the statistics; in `grpo` it counts once. The two agree where all trajectories are equally long. `of`: the
    outcome, or the composed total.

    Statistics in float64 over trajectories in the baseline. Raises TrainingError for a reward that is not finite.
    """
    check_knob("broadcast", "of", of, ("total", "outcome"))
    step = turns_of(groups, scores)
    values = step.outcomes
    if of == "total":
        values = values + np.bincount(step.trajectory, weights=step.rewards)[step.trajectory]
    normalise = normaliser("broadcast", scale, ddof=ddof, eps=eps)
    return step.to_tokens(step.within(step.group.tolist(), values, normalise)), state
