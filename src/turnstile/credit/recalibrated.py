"""SPEAR's recalibrated advantage, which compares an outcome with what the policy achieved recently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from turnstile.credit.base import EQUAL, Advantages, Scores, State, to_tokens
from turnstile.credit.grpo import grpo
from turnstile.credit.invariants import KEPT, WHOLE_STEP, at, declare
from turnstile.credit.stats import GroupRewards, Of, check_knob, check_range, check_scores, group_rewards
from turnstile.types import Group


@declare(at({3: WHOLE_STEP, 6: KEPT}), at({3: WHOLE_STEP}, over="trajectories", positive=False))
def recalibrated(
    groups: Sequence[Group],
    scores: Scores,
    state: State,
    *,
    window: int = 10240,
    over: Literal["groups", "trajectories"] = "groups",
    positive: bool = True,
    fresh: Literal["median", "group"] = "median",
    of: Of = "outcome",
) -> tuple[Advantages, State]:
    """A_i = max(0, R_i - b), with b the median of recent rewards (SPEAR, arXiv 2509.22601).

    A replayed attempt was good when it was sampled. The policy's recent rewards show what it is worth now, without
    running its task again. The estimator's `state`, which checkpoints store, holds the last `window` group means (as in
    the paper's code) or, with `over = "trajectories"`, rewards of single attempts; both include this step's. A replayed
    attempt, from the recipe's `[replay_buffer]`, is in the gradient and not in the baseline (`Score.in_baseline`), so
    it is compared but not remembered. `positive = False` keeps values below b, with their sign. With `fresh = "group"`
    only replayed attempts get A_i; the others get the advantage of `grpo`, as in the paper, which adds the two
    objectives.

    Median and positive part are those of the paper's code, which can also divide by the median deviation of groups, but
    does not by default. `of`: the outcome R_i or the composed total S_i. Computed in float64. Values within 1e-8 of b
    give exactly 0, and all values do as long as nothing is remembered. Raises TrainingError if a reward is not finite.
    """
    check_knob("recalibrated", "over", over, ("groups", "trajectories"))
    check_knob("recalibrated", "of", of, ("total", "outcome"))
    check_knob("recalibrated", "fresh", fresh, ("median", "group"))
    check_range("recalibrated", 1, np.inf, window=window)
    check_scores(groups, scores)
    found = [group_rewards(group, group_scores, of) for group, group_scores in zip(groups, scores, strict=True)]
    reached = [value for group, m in zip(groups, found, strict=True) for value in _values_to_remember(group, m, over)]
    recent = [*state.get("recent", ()), *reached][-window:]
    advantages: Advantages = []
    for group, m in zip(groups, found, strict=True):
        values = m.values - np.median(recent) if recent else np.zeros_like(m.values)
        values = np.where(np.abs(values) < EQUAL, 0.0, values)
        values = np.maximum(values, 0.0) if positive else values
        advantages += to_tokens(group, np.where(m.in_gradient, values, 0.0).tolist())
    if fresh == "group":
        compared = grpo(groups, scores, of=of)
        counted = [bool(one) for m in found for one in m.in_baseline]
        advantages = [own if now else old for own, old, now in zip(compared, advantages, counted, strict=True)]
    return advantages, {**state, "recent": recent}


def _values_to_remember(group: Group, m: GroupRewards, over: str) -> list[float]:
    """Return the values that a group adds to the memory; attempts are sorted by their number."""
    if not m.in_baseline.any():
        return []
    if over == "groups":
        return [float(m.values[m.in_baseline].mean())]
    order = sorted(np.flatnonzero(m.in_baseline).tolist(), key=lambda i: group.trajectories[i].attempt)
    return [float(m.values[i]) for i in order]
