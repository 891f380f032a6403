"""SPA-RL's credit, which redistributes the outcome over the turns by their estimated contributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores, learned
from turnstile.credit.invariants import at, declare
from turnstile.credit.stats import F64, Eps, Scale, check_knob, check_range, normaliser
from turnstile.credit.turns import turns_of
from turnstile.types import Group


def _outcomes(groups: Sequence[Group], scores: Scores, aux: Mapping[str, Any], **_: Any) -> F64:
    """Return the target sum of each attempt's contributions, f64[trajectories]: its outcome, or NaN for none."""
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
    eps: Eps = 1e-6,
) -> Advantages:
    """A_{i,t} = normalised G_{i,t} = sum_{k >= t} gamma^(k-t) (alpha c_{i,k} + r_{i,k}) (SPA-RL, arXiv 2505.20732).

    G_{i,t} is normalised among the turns of the group at the same index. The contributions c_{i,k} take the place of
    the outcome R_i; they are learned such that sum_k c_{i,k} is R_i.

    The step rewards r are the paper's grounding signal, which says whether an action could be executed: the reward
    `command_succeeded` (or `valid_format`) with weight 0.5, as in the paper's code. A gate withholds it like any step
    reward.

    The paper trains its estimator before RL begins. Here it learns during RL, and predicts before it learns from the
    step. `rest = "last"` adds the residual R_i - sum_k c_{i,k} to the last turn, so the full outcome is paid however
    little the estimator knows. With `alpha = gamma = 1` this moves credit in time and does not change any attempt's
    sum. `rest = "none"` is the paper's: the outcome teaches nothing until the estimator has learned, and the
    estimator's errors are a bias. The use of group means instead of the paper's PPO critic is ours.

    Needs the estimator, which the trainer provides and fits (`[credit.critic]`). Statistics are float64 over
    trajectories in the baseline. A turn without others to compare with gets 0; equal outcomes do not give 0. Raises
    ConfigError if `aux["progress"]` is missing, TrainingError if a reward or a contribution is not finite.
    """
    check_knob("progress_attribution", "rest", rest, ("last", "none"))
    check_range("progress_attribution", 0.0, np.inf, alpha=alpha)
    check_range("progress_attribution", 0.0, 1.0, gamma=gamma)
    normalise = normaliser("progress_attribution", scale, ddof=ddof, eps=eps)
    step = turns_of(groups, scores)
    given = alpha * step.turn_predictions("progress_attribution", aux, "progress")
    given[~(step.in_baseline | step.in_gradient)] = 0.0
    if rest == "last":
        sums = np.bincount(step.trajectory, weights=given)[step.trajectory] if len(given) else given
        given = given + np.where(step.last, step.outcomes - sums, 0.0)
    at_index = list(zip(step.group.tolist(), step.index.tolist(), strict=True))
    return step.to_tokens(step.within(at_index, step.sums_to_go(given + step.rewards, gamma), normalise))
