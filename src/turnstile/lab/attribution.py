"""The contributions of turns that an ideal progress estimator would find.

It has the same view of the state as the policy, and its least-squares objective is solved exactly rather than fitted.
"""

from __future__ import annotations

import numpy as np

from turnstile.lab.world import F64, World, sums


def contributions(world: World, probabilities: F64) -> list[F64]:
    """Return c(view, action) of each turn, [P] -> f64[K], the minimiser of the mean of (sum_t c_t - outcome)^2.

    The mean is over paths with these probabilities f64[P]. Of all minimisers, the one with the smallest norm is
    returned. Outcomes are summed over agents.
    """
    tokens = np.arange(len(world.logits))
    turn = world.path_of * (int(world.turn_of.max()) + 1) + world.turn_of
    last = tokens[np.append(np.diff(turn) != 0, True)]  # a turn's last logit identifies its view and whole action
    owner, column = world.path_of[last], world.logits[last]
    p, d = len(world.paths), world.parameters
    design = sums(owner * d + column, np.ones(len(last)), p * d).reshape(p, d)
    outcomes = np.array([sum(path.outcome.values()) for path in world.paths])
    weighted = design * probabilities[:, None]
    found = np.linalg.pinv(design.T @ weighted, rcond=1e-10, hermitian=True) @ (weighted.T @ outcomes)
    return np.split(found[column], np.cumsum([len(path.steps) for path in world.paths])[:-1])
