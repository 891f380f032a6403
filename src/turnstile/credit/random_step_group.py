"""Comparison of turns in random step groups, for environments whose states never repeat."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import at, declare
from turnstile.credit.stats import Eps, Of, Scale, check_knob, check_range, normaliser, relative
from turnstile.credit.turns import Turns, turns_of
from turnstile.types import Group


@declare(at(size=4), at(size=4, compare="return"))
def random_step_group(
    groups: Sequence[Group],
    scores: Scores,
    *,
    size: int = 16,
    omega: float = 1.0,
    compare: Literal["reward", "return"] = "reward",
    gamma: float = 1.0,
    seed: int = 0,
    of: Of = "total",
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = A_E(i) + omega A_S(i,t), where A_S compares turns of the group that are grouped at random.

    This is the step part of SRGPO (SeeNav-Agent, arXiv 2512.02631). Step rewards that mean the same in every state can
    be compared across states, so step groups of about `size` turns are drawn at random among the group's turns.
    `compare`: the step reward r_{i,t}, or the return G_{i,t} with `gamma`. The draw depends only on (seed, group,
    attempt, turn), so the order of attempts does not matter. We know the method from its abstract and implement that
    description; the paper's own constants were not available.

    Statistics are float64 over trajectories in the baseline. Only their turns are drawn; any other turn has A_S = 0.
    Raises TrainingError if a reward is not finite.
    """
    check_knob("random_step_group", "compare", compare, ("reward", "return"))
    check_range("random_step_group", 0.0, 1.0, gamma=gamma)
    check_range("random_step_group", 2, np.inf, size=size)
    normalise = normaliser("random_step_group", scale, ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    episode = relative("random_step_group", groups, scores, normalise, of=of)[step.trajectory]
    values = step.rewards if compare == "reward" else step.returns(gamma)
    return step.to_tokens(episode + omega * step.within(_drawn(step, size, seed), values, normalise))


def _drawn(step: Turns, size: int, seed: int) -> list[Hashable]:
    """Return the label of each turn's random step group, [T]; these have nearly equal sizes.

    A turn outside the baseline has a label of its own.
    """
    labels: list[Hashable] = list(range(len(step.turns)))
    for place, group in enumerate(step.groups):
        drawn = [int(t) for t in np.flatnonzero((step.group == place) & step.in_baseline)]
        attempts = [trajectory.attempt for trajectory in group.trajectories]
        first = int(step.trajectory[step.group == place].min(initial=len(labels)))

        def chance(t: int) -> bytes:
            key = (seed, group.id, attempts[step.trajectory[t] - first], int(step.index[t]))  # noqa: B023
            return hashlib.sha256(repr(key).encode()).digest()

        drawn.sort(key=chance)
        for number, members in enumerate(np.array_split(np.array(drawn, dtype=np.int64), max(1, len(drawn) // size))):
            for t in members:
                labels[t] = (place, number)
    return labels
