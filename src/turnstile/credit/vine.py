"""Turn-level Monte Carlo credit, which estimates the value that a turn adds from continuations of its states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import at, declare
from turnstile.credit.lineage import Snapshots, snapshots
from turnstile.credit.stats import F64, Flags, check_knob, check_range, equal
from turnstile.credit.turns import turns_of
from turnstile.types import Group

_SHARED = "what a continuation shares is credited in the attempt that it left"


@declare(at({6: _SHARED}), at({6: _SHARED}, train="roots"))
def vine(
    groups: Sequence[Group],
    scores: Scores,
    *,
    gamma: float = 1.0,
    train: Literal["all", "roots"] = "all",
) -> Advantages:
    """A_t = r_t + gamma V(s_{t+1}) - V(s_t), V the mean return of continuations from s_t (VinePPO, arXiv 2410.01679).

    The paper estimates V for reasoning steps instead of turns. With another policy's continuations, these are the
    process rewards of PAV (arXiv 2410.08146).

    A continuation is an attempt that left another before a turn (`Trajectory.parent` with token 0). For an attempt,
    V(s_t) is the mean over all other attempts that continued from s_t. It never contains the attempt's own return, so
    it is an unbiased baseline. At the start of the task, these are the group's other attempts from there, as in `rloo`.
    The last turn has r_K + R instead of r_K + gamma V. Turns between two snapshots are one step and share r_t + ... +
    gamma^n V(s_{t+n}) - V(s_t).

    With `train = "all"` a continuation also learns, from where it left; its shared turns get 0 here, because they get
    their credit in the attempt that it left. With `roots`, as in the paper, continuations only estimate values. A step
    gets 0 if no other attempt continued from its start. Attempts that never branch get the advantage of `rloo` on the
    total.

    Computed in float64 over trajectories in the baseline. Raises TrainingError if a reward is not finite, or if an
    attempt left another inside a turn.
    """
    check_knob("vine", "train", train, ("all", "roots"))
    check_range("vine", 0.0, 1.0, gamma=gamma)
    step = turns_of(groups, scores)
    lengths = [len(trajectory.turns) for group in groups for trajectory in group.trajectories]
    begins = np.append(0, np.cumsum(lengths, dtype=np.int64))
    returns = np.split(step.returns(gamma), begins[1:-1])
    credit: list[F64] = []
    for group, group_scores in zip(groups, scores, strict=True):
        here = len(credit)
        own = returns[here : here + len(group.trajectories)]
        counted = np.array([score.in_baseline for score in group_scores], dtype=np.bool_)
        found = snapshots(group)
        for place in range(len(own)):
            learns = train == "all" or found.begins[place] == 0
            credit.append(_stretches(place, own, counted, found, gamma) if learns else np.zeros(len(own[place])))
    return step.to_tokens(np.concatenate(credit) if credit else np.zeros(0))


def _stretches(place: int, returns: Sequence[F64], counted: Flags, found: Snapshots, gamma: float) -> F64:
    """Return one attempt's credit f64[K], computed between the states from which other attempts continued too."""
    own = returns[place]
    credit = np.zeros(len(own))
    values: dict[int, float] = {}
    for turn in range(found.begins[place], len(own)):
        others = [j for j in found.through(place, turn) if j != place and counted[j] and len(returns[j]) > turn]
        if others:
            known = np.array([returns[j][turn] for j in others])
            values[turn] = float(known[0] if equal(known) else known.mean())
    for begin, end in pairwise([*values, len(own)]):
        gained = own[begin]
        if end < len(own):
            gained += gamma ** (end - begin) * (values[end] - own[end])
        credit[begin:end] = gained - values[begin]
    return credit
