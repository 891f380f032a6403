"""GiGPO's advantage, which compares attempts within their group, and turns that began in the same state."""

from __future__ import annotations

from collections.abc import Sequence

from turnstile.credit.base import Advantages, Scores
from turnstile.credit.invariants import LENGTHS, at, declare
from turnstile.credit.stats import Eps, Of, Scale, check_range, normaliser, relative
from turnstile.credit.turns import turns_of
from turnstile.types import Group


@declare(at({7: LENGTHS}), at(gamma=1.0), at(gamma=1.0, scale="none"))
def gigpo(
    groups: Sequence[Group],
    scores: Scores,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    of: Of = "total",
    scale: Scale = "std",
    ddof: int = 1,
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = A_E(i) + omega A_S(i,t) (GiGPO, arXiv 2505.10978).

    A_E compares the reward of attempt i with its group, as `grpo` does. A_S compares the return G_{i,t}, discounted
    with `gamma`, among all turns of the group that began in the same state (`state_key`, set by the environment); the
    paper calls these a step group. A turn without a key, or alone in its state, has A_S = 0, so this is `grpo` if
    states never repeat. `scale = "none"` only centres, in both parts.

    Statistics are float64 over trajectories in the baseline; if the values compared lie within 1e-8, the result is
    exactly 0. Raises TrainingError if a reward is not finite.
    """
    check_range("gigpo", 0.0, 1.0, gamma=gamma)
    normalise = normaliser("gigpo", scale, ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    episode = relative("gigpo", groups, scores, normalise, of=of)[step.trajectory]
    anchored = step.within(step.states(), step.returns(gamma), normalise)
    return step.to_tokens(episode + omega * anchored)
