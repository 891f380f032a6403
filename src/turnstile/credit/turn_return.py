"""Turn-level advantages: the discounted return from each turn on, normalised among turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores, State
from turnstile.credit.stats import F64, Flags, centred, check_knob, check_scores, members, not_finite, standardised
from turnstile.errors import ConfigError
from turnstile.types import Group, Score


def turn_return(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    state: State,
    *,
    gamma: float = 1.0,
    among: Literal["index", "batch", "mixed"] = "index",
    mix: float = 0.5,
    scale: Literal["std", "none"] = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> tuple[Advantages, State]:
    """A_{i,t} = normalised G_{i,t}, given to every token of turn t, where
    G_{i,t} = sum_{k >= t} gamma^(k-t) r_{i,k} + gamma^(K-t) R_i.

    `among` says what a turn is compared with: `index`, the turns of its group at the same turn index; `batch`,
    all turns of the step; `mixed`, mix * index + (1 - mix) * batch (MAPO, arXiv 2603.06194, combines a turn-level
    with a batch-level normalisation; the weight of the two is ours). MARS (arXiv 2510.15414) estimates advantages
    by turn in the same manner; its normalisation by agent is not this function's. `scale = "none"` only centres.

    Statistics in float64 over trajectories in the baseline. A turn with nobody to be compared with, or whose
    comparison lies within 1e-8, gets exactly 0. Raises TrainingError for a reward that is not finite.
    """
    check_knob("turn_return", "among", among, ("index", "batch", "mixed"))
    check_knob("turn_return", "scale", scale, ("std", "none"))
    check_knob("turn_return", "ddof", ddof, (0, 1))
    if not 0.0 <= gamma <= 1.0 or not 0.0 <= mix <= 1.0:
        raise ConfigError(f"credit 'turn_return': gamma and mix lie in [0, 1], got {gamma} and {mix}")
    check_scores(groups, scores)
    returns: list[F64] = []  # [trajectory] -> f64[K]
    counted: list[bool] = []
    learning: list[bool] = []
    for group, group_scores in zip(groups, scores, strict=True):
        m = members(group, group_scores, "total")
        counted += m.counted.tolist()
        learning += m.learning.tolist()
        returns += [
            discounted(group, index, score, gamma)
            if m.counted[index] or m.learning[index]
            else np.zeros(len(score.turn))
            for index, score in enumerate(group_scores)
        ]

    def normalise(values: F64, who: Flags) -> F64:
        return standardised(values, who, ddof=ddof, eps=eps) if scale == "std" else centred(values, who)

    result = [np.zeros_like(values) for values in returns]
    share = {"index": 1.0, "batch": 0.0, "mixed": mix}[among]
    for weight, peers in ((share, _by_index(groups, returns)), (1.0 - share, _whole(returns))):
        if weight == 0.0:
            continue
        for slots in peers:
            values = normalise(
                np.array([returns[i][t] for i, t in slots]), np.array([counted[i] for i, _ in slots], dtype=np.bool_)
            )
            for (i, t), value in zip(slots, values, strict=True):
                result[i][t] += weight * value
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    advantages = [
        [
            np.full(len(turn.completion.token_ids), value if learns else 0.0, dtype=np.float32)
            for turn, value in zip(trajectory.turns, values, strict=True)
        ]
        for trajectory, values, learns in zip(trajectories, result, learning, strict=True)
    ]
    return advantages, state


def discounted(group: Group, index: int, score: Score, gamma: float) -> F64:
    """G_t of one trajectory, f64[K]; the terminal reward falls on the last turn, whatever was observed after it."""
    rewards = score.turn.astype(np.float64)
    if not np.isfinite(rewards).all():
        raise not_finite(group, group.trajectories[index].attempt, f"step rewards {score.turn.tolist()}")
    result = np.zeros_like(rewards)
    ahead = float(sum((score.outcome or {}).values()))
    for t in range(len(rewards) - 1, -1, -1):
        # the terminal reward belongs to the last turn itself, so it is not discounted there
        ahead = rewards[t] + (ahead if t == len(rewards) - 1 else gamma * ahead)
        result[t] = ahead
    return result


def _by_index(groups: Sequence[Group], returns: Sequence[F64]) -> list[list[tuple[int, int]]]:
    """The (trajectory, turn) slots of each group at each turn index."""
    peers = []
    first = 0
    for group in groups:
        members_of = range(first, first + len(group.trajectories))
        longest = max((len(returns[i]) for i in members_of), default=0)
        peers += [[(i, t) for i in members_of if t < len(returns[i])] for t in range(longest)]
        first = members_of.stop
    return peers


def _whole(returns: Sequence[F64]) -> list[list[tuple[int, int]]]:
    slots = [(i, t) for i, values in enumerate(returns) for t in range(len(values))]
    return [slots] if slots else []
