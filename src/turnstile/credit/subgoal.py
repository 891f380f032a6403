"""Two-level credit, for choosing a subgoal and for the turns that pursue it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores, reads, signal_name
from turnstile.credit.invariants import LENGTHS, at, declare
from turnstile.credit.stats import F64, Eps, Scale, check_knob, check_range, normaliser
from turnstile.credit.turns import I64, Turns, turns_of, within
from turnstile.types import Group


@declare(at(), at({7: LENGTHS}, among="name", gamma=0.9, gamma_low=0.9))
@reads("key")
def subgoal(
    groups: Sequence[Group],
    scores: Scores,
    *,
    key: str = "subgoal",
    reached: str = "subgoal_reached",
    omega: float = 1.0,
    gamma: float = 1.0,
    gamma_low: float = 1.0,
    among: Literal["index", "name"] = "index",
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = A_high(segment of t) + omega A_low(t), for policies that set subgoals and pursue them.

    The two levels are those of hierarchical methods with a policy that sets subgoals and one that pursues them (VSC-RL,
    arXiv 2502.07949; GLIDER, arXiv 2505.19761). A segment is a run of turns whose signal `key` names the same subgoal.

    A_high normalises the return of the segment: the sum of its step rewards and of the later segments', discounted with
    `gamma` per segment, with the outcome at the last one. It compares the group's segments at the same index in their
    attempts (`among = "name"`: of the same subgoal). A_low normalises the step rewards from turn t to the end of the
    segment, discounted with `gamma_low`, plus 1 at that end if its signal `reached` is set. It compares the group's
    turns that pursued the same subgoal.

    Both papers learn a critic for each level, and VSC-RL adds a divergence from a reference, which belongs in a loss.
    Group means instead of the critics are ours. Turns without the signal are one segment and have no low part. If no
    turn names a subgoal, this is `grpo` on the total, and a run warns about it.

    Statistics are float64 over trajectories in the baseline. Raises TrainingError if a reward is not finite.
    """
    check_knob("subgoal", "among", among, ("index", "name"))
    check_range("subgoal", 0.0, 1.0, gamma=gamma, gamma_low=gamma_low)
    check_range("subgoal", 0.0, np.inf, omega=omega)
    normalise = normaliser("subgoal", scale, ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    names = [signal_name(turn, key) for turn in step.turns]
    begins = [t for t in range(len(names)) if step.index[t] == 0 or names[t] != names[t - 1]]
    first = np.array(begins, dtype=np.int64)
    segment = np.searchsorted(first, np.arange(len(names)), side="right") - 1
    group, trajectory = step.group[first].tolist(), step.trajectory[first]
    number = np.arange(len(first)) - np.searchsorted(trajectory, trajectory)
    alike: list[Hashable] = list(
        zip(group, [names[t] for t in begins] if among == "name" else number.tolist(), strict=True)
    )
    high = within(alike, _high(step, segment, trajectory, gamma), step.in_baseline[first], normalise)
    pursued: list[Hashable] = [
        (g, name) if name else place for place, (g, name) in enumerate(zip(step.group.tolist(), names, strict=True))
    ]
    low = step.within(pursued, _low(step, segment, reached, gamma_low), normalise)
    return step.to_tokens(high[segment] + omega * low)


def _high(step: Turns, segment: I64, trajectory: I64, gamma: float) -> F64:
    """Return the return to go of each segment, f64[segments]."""
    own = np.bincount(segment, weights=step.rewards + np.where(step.last, step.outcomes, 0.0))
    returns = np.zeros(len(trajectory))
    for s in range(len(returns) - 1, -1, -1):
        goes_on = s + 1 < len(returns) and trajectory[s + 1] == trajectory[s]
        returns[s] = own[s] + (gamma * returns[s + 1] if goes_on else 0.0)
    return returns


def _low(step: Turns, segment: I64, reached: str, gamma: float) -> F64:
    """Return the return to go of each turn within its segment, f64[T]."""
    returns = np.zeros(len(segment))
    for t in range(len(returns) - 1, -1, -1):
        if t + 1 < len(returns) and segment[t + 1] == segment[t]:
            returns[t] = step.rewards[t] + gamma * returns[t + 1]
        else:
            returns[t] = step.rewards[t] + float(bool(step.turns[t].signals.get(reached)))
    return returns
