"""Tree credit, which values each turn by how it changes the mean outcome of the trajectories below it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import at, declare
from turnstile.credit.lineage import START, common
from turnstile.credit.stats import F64, Flags, Of, check_knob, check_range, check_scores, flat, group_rewards
from turnstile.types import Group

_BEHIND = "behind the last branching a turn adds nothing to the mean outcome below it"


@declare(at(), at({5: _BEHIND, 6: _BEHIND}, overall=0.0))
def tree(
    groups: Sequence[Group],
    scores: Scores,
    *,
    local: float = 1.0,
    overall: float = 1.0,
    by_leaves: bool = True,
    of: Of = "outcome",
) -> Advantages:
    """A_{i,t} = (local (V(after t) - V(before t)) + overall (V(after t) - V(root))) / sqrt(leaves).

    TreeRL, arXiv 2506.11902. V(node) is the mean reward of the trajectories below a node of the tree of branches:
    before turn t, these share all turns before t with trajectory i; after it, they share turn t too; at the root, they
    are the whole group. A turn that branches share is trained once for each of them, so `by_leaves` divides by the
    square root of their number. With `overall = 0`, turns after the last branching point get 0. Attempts that never
    branch are a tree of depth one.

    `Trajectory.parent` says where a branch left its parent. `of`: the outcome R_i or the composed total S_i. Statistics
    are float64 over trajectories in the baseline; the result is exactly 0 if fewer than two of them count or all are
    equal. Raises TrainingError if a reward is not finite.
    """
    check_knob("tree", "of", of, ("total", "outcome"))
    check_range("tree", 0.0, np.inf, local=local, overall=overall)
    check_scores(groups, scores)
    advantages: Advantages = []
    for group, group_scores in zip(groups, scores, strict=True):
        m = group_rewards(group, group_scores, of)
        shared = common(group)
        enough = not flat(m.values, m.in_baseline)
        for i, trajectory in enumerate(group.trajectories):
            marks = [START, *((t + 1, 0) for t in range(len(trajectory.turns)))]
            below = [np.array([reach >= mark or j == i for j, reach in enumerate(shared[i])]) for mark in marks]
            value = [_mean(m.values, m.in_baseline & inside, m.values[i]) for inside in below]
            leaves = [max(1, int((m.in_baseline & inside).sum())) if by_leaves else 1 for inside in below]
            credit = [
                (local * (value[t + 1] - value[t]) + overall * (value[t + 1] - value[0])) / np.sqrt(leaves[t + 1])
                for t in range(len(trajectory.turns))
            ]
            advantages.append(
                [
                    np.full(
                        len(turn.completion.token_ids), one if enough and m.in_gradient[i] else 0.0, dtype=np.float32
                    )
                    for turn, one in zip(trajectory.turns, credit, strict=True)
                ]
            )
    return advantages


def _mean(values: F64, inside: Flags, alone: float) -> float:
    return float(values[inside].mean()) if inside.any() else float(alone)
