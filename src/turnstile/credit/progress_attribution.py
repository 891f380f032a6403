"""SPA-RL's credit: the outcome, redistributed over the turns by what each is found to have contributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores, learned
from turnstile.credit.invariants import at, declare
from turnstile.credit.stats import F64, Scale, check_knob, check_range, normaliser
from turnstile.credit.turns import turns_of
from turnstile.types import Group


def _outcomes(groups: Sequence[Group], scores: Scores, aux: Mapping[str, Any], **_: Any) -> F64:
    """Return the sum that the contributions of each attempt should have, f64[trajectories]: its outcome, or NaN."""
    flat = [score for group_scores in scores for score in group_scores]
    return np.array(
        [sum(s.outcome.values()) if s.in_baseline and s.outcome is not None else np.nan for s in flat], dtype=np.float64
    )


_NOT_ADDED = "the outcome is not added: the estimator has learned of earlier ones"
_CONTRIBUTED = "contributions are a model's word, which differs at turns of one index also where outcomes are equal"


@declare(
    at({7: _CONTRIBUTED}),
    at({5: _NOT_ADDED, 7: _CONTRIBUTED}, rest="none", scale="none"),
)
@learned("critic", "turnstile.trainer.progress:ProgressEstimator", _outcomes)
def progress_attribution(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    *,
    alpha: float = 1.0,
    rest: Literal["last", "none"] = "last",
    gamma: float = 1.0,
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Advantages:
    """A_{i,t} = G_{i,t}, normalised among the turns of the group at the same index, with
    G_{i,t} = sum_{k >= t} gamma^(k-t) (alpha c_{i,k} + r_{i,k}): in the place of the outcome R_i each turn gets its
    contribution c_{i,k}, which is learned such that sum_k c_{i,k} is R_i (SPA-RL, arXiv 2505.20732).

    The step rewards r are the paper's grounding signal, whether an action could be executed: the reward
    `command_succeeded` (or `valid_format`) with the weight 0.5, which its code gives it. Behind a gate it is withheld
    as every step reward is.

    The paper trains its estimator before RL begins; this one learns in the same step, and tells what it knew before.
    What its contributions leave of an outcome, R_i - sum_k c_{i,k}, falls on the last turn (`rest = "last"`): so all of
    the outcome is given whatever the estimator knows, and with `alpha = gamma = 1` it moves credit in time and changes
    no attempt's sum. `rest = "none"` is the paper's: it teaches nothing before the estimator says anything, and what
    that has wrong is a bias. Means of the group in the place of the paper's PPO critic are ours.

    Needs the estimator, which the trainer brings and fits (`[credit.critic]`). Float64, over trajectories in the
    baseline; a turn with nobody to be compared with gets 0, equal outcomes do not. Raises ConfigError where
    `aux["progress"]` is missing, TrainingError for a reward or a contribution that is not finite.
    """
    check_knob("progress_attribution", "rest", rest, ("last", "none"))
    check_range("progress_attribution", 0.0, np.inf, alpha=alpha)
    check_range("progress_attribution", 0.0, 1.0, gamma=gamma)
    normalise = normaliser("progress_attribution", scale, ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    given = alpha * step.judged("progress_attribution", aux, "progress")
    given[~(step.counted | step.learning)] = 0.0
    if rest == "last":
        sums = np.bincount(step.trajectory, weights=given)[step.trajectory] if len(given) else given
        given = given + np.where(step.last, step.outcomes - sums, 0.0)
    at_index = list(zip(step.group.tolist(), step.index.tolist(), strict=True))
    return step.to_tokens(step.within(at_index, step.sums_to_go(given + step.rewards, gamma), normalise))
