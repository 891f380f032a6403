"""Multi-agent credit, which compares each agent's turns only with that agent's turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import LENGTHS, at, declare
from turnstile.credit.stats import Eps, Scale, check_range, normaliser
from turnstile.credit.turns import seat_outcomes, turns_of
from turnstile.types import Group


@declare(at(), at({7: LENGTHS}, gamma=0.9))
def per_agent(
    groups: Sequence[Group],
    scores: Scores,
    *,
    gamma: float = 1.0,
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = normalised G_{i,t}, among all turns of the group by the same agent (MARS, arXiv 2510.15414).

    G_{i,t} sums the agent's step rewards from turn t on and its own outcome, which falls on its last turn. `gamma`
    discounts per turn of that agent. Agents whose rewards differ in scale or sign, as in a two-player game, therefore
    do not shift each other's baseline. In a group of one attempt, an agent's turns are compared with each other, so the
    result is 0 only if all of the agent's returns are equal, as without step rewards and with `gamma = 1`.

    Statistics are float64 over trajectories in the baseline. Raises TrainingError if a reward is not finite.
    """
    check_range("per_agent", 0.0, 1.0, gamma=gamma)
    normalise = normaliser("per_agent", scale, ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    outcomes = seat_outcomes(step, scores)
    returns = np.zeros(len(step.turns))
    ahead: dict[tuple[int, str], float] = {}
    for t in range(len(returns) - 1, -1, -1):
        seat = (int(step.trajectory[t]), step.turns[t].agent)
        ahead[seat] = step.rewards[t] + (gamma * ahead[seat] if seat in ahead else outcomes[t])
        returns[t] = ahead[seat]
    labels = [(int(group), turn.agent) for group, turn in zip(step.group, step.turns, strict=True)]
    return step.to_tokens(step.within(labels, returns, normalise))
