"""AEPO's advantage, which gives more weight to tokens on which the policy was uncertain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.stats import Eps, Of, Scale, normaliser, relative, standardised
from turnstile.credit.turns import turns_of
from turnstile.types import Group


def entropy_aware(
    groups: Sequence[Group],
    scores: Scores,
    *,
    alpha: float = 0.3,
    of: Of = "total",
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_n = A_i (1 + alpha Z_n), Z_n = (H_n - mean) / (std + eps) over the group's tokens (AEPO, arXiv 2510.14545).

    A_i is the advantage of `grpo`, and H_n the entropy of token n in nats. The entropy changes the size of an
    advantage, and its sign only if alpha Z_n < -1. If all entropies are equal, this is `grpo`. The default of `alpha`
    is the paper's, quoted from memory.

    Statistics are float64 over trajectories in the baseline. Raises TrainingError if entropies are missing or a reward
    is not finite.
    """
    step = turns_of(groups, scores)
    normalise = normaliser("entropy_aware", scale, ddof=ddof, eps=eps)
    own = relative("entropy_aware", groups, scores, normalise, of=of)[step.trajectory]
    takes_part = (step.in_baseline | step.in_gradient) & step.valued
    found = iter(step.entropies("entropy_aware", takes_part))
    entropies = [
        next(found) if part else np.zeros(len(turn.completion.token_ids))
        for turn, part in zip(step.turns, takes_part, strict=True)
    ]
    result = [np.zeros_like(values) for values in entropies]
    for group in range(len(groups)):
        turns = np.flatnonzero(step.group == group)
        if not len(turns):
            continue
        counted = np.repeat((step.in_baseline & step.valued)[turns], [len(entropies[t]) for t in turns])
        z = standardised(np.concatenate([entropies[t] for t in turns]), counted, ddof=ddof, eps=eps)
        for t, values in zip(turns, np.split(z, np.cumsum([len(entropies[t]) for t in turns])[:-1]), strict=True):
            result[t] = own[t] * (1.0 + alpha * values) * step.in_gradient[t]
    return step.split(result)
