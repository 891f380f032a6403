"""Step-level Monte Carlo: what a turn adds to the outcome expected of its state, by playing on from there."""

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
    """A_t = r_t + gamma V(s_{t+1}) - V(s_t), V(s_t) the mean return of M continuations out of a snapshot at turn t
    (VinePPO, arXiv 2410.01679, over turns instead of steps of reasoning; with another policy's continuations the
    process rewards of PAV, arXiv 2410.08146).

    A continuation is an attempt that left another before a turn (`Trajectory.parent` with token 0). V(s_t) for an
    attempt is the mean over all others played on from s_t, never its own return, so it is a baseline without bias; at
    the start these are the group's other attempts from there, as in `rloo`. The last turn has r_K + R in place of
    r_K + gamma V. Turns between two snapshots are one step and share r_t + ... + gamma^n V(s_{t+n}) - V(s_t).

    With `train = "all"` a continuation learns too, from where it left; the turns it shares get their credit in the
    attempt it left, and 0 here. `roots`: continuations only tell values, as in the paper. A step whose start nobody
    else played on from gets 0; attempts that never branch have `rloo`'s credit on the total.

    Float64 over trajectories in the baseline. Raises TrainingError for a reward that is not finite, and for an attempt
    that left another inside a turn.
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
    """Return the credit [K] of one attempt, segment by segment between states from which others continued too."""
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
