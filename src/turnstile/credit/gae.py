"""Generalised advantage estimation, over tokens, over turns, and over both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnstile.credit.base import Advantages, Scores, learned
from turnstile.credit.invariants import CRITIC, WHOLE_STEP, at, declare
from turnstile.credit.stats import F64, Eps, Scale, check_knob, check_range
from turnstile.credit.turns import Turns, turns_of
from turnstile.types import Group


def _gae_targets(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: bool = False,
    **_: Any,
) -> Advantages:
    step = turns_of(groups, scores)
    values = step.token_predictions("gae", aux, "values")
    return _targets(step, values, _by_token(step, values, gamma, lam, bootstrap))


@declare(
    at({7: CRITIC}),
    at({3: WHOLE_STEP, 7: CRITIC}, gamma=0.9, lam=0.5, scale="std"),
    at({7: CRITIC}, bootstrap=True),
)
@learned("critic", "turnstile.trainer.critic:Critic", _gae_targets)
def gae(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: bool = False,
    scale: Scale = "none",
    eps: Eps = 1e-8,
) -> Advantages:
    """A_n = sum_k (gamma lam)^k delta_{n+k}, delta_n = r_n + gamma V_{n+1} - V_n (GAE, arXiv 1506.02438).

    n runs over the trained tokens of the whole trajectory. The last token of a turn is followed by the first token of
    the next turn, so observations add neither a discount step nor a value. V_n is the critic's value before token n is
    sampled. A turn's reward falls on its last token, and the outcome on the very last token, after which V = 0. With
    `bootstrap`, an episode that a limit stopped (turns, context, tokens or clock) does not end with V = 0, because its
    future return is not 0. It ends with the last value that the critic was asked for, the one before its last token.
    `scale = "std"` normalises over the tokens of the step, as is common for PPO.

    Needs a critic, which the trainer provides (`[credit.critic]`); it learns A_n + V_n. Computed in float64. Raises
    ConfigError if `aux["values"]` is missing, TrainingError if a reward is not finite.
    """
    check_range("gae", 0.0, 1.0, gamma=gamma, lam=lam)
    check_knob("gae", "scale", scale, ("std", "none"))
    step = turns_of(groups, scores)
    raw = _by_token(step, step.token_predictions("gae", aux, "values"), gamma, lam, bootstrap)
    return step.split(step.over_tokens(raw, scale, eps, among=step.valued))


def _turn_gae_targets(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: bool = False,
    **_: Any,
) -> Advantages:
    step = turns_of(groups, scores)
    values = step.token_predictions("turn_gae", aux, "values")
    found = [np.full(len(own), np.nan) for own in values]  # the value of a turn is that of its first token
    first = _ends(values, 0)
    for own, value, advantage in zip(found, first, _by_turn(step, first, gamma, lam, bootstrap), strict=True):
        own[:1] = value + advantage
    return step.split(_of_counted(step, found), forced=np.nan)


@declare(at({7: CRITIC}), at({7: CRITIC}, bootstrap=True))
@learned("critic", "turnstile.trainer.critic:Critic", _turn_gae_targets)
def turn_gae(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: bool = False,
    scale: Scale = "none",
    eps: Eps = 1e-8,
) -> Advantages:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, given to every token of turn t.

    This is GAE over turns (Turn-PPO, arXiv 2512.17008; VL-DAC, arXiv 2508.04280). V_t is the critic's value before the
    first token of turn t. The action is the whole turn, however many tokens it has, and `gamma` discounts turns. The
    outcome falls on the last turn, after which V = 0. With `bootstrap`, an episode that a limit stopped ends with the
    value of its last turn instead of 0. `scale = "std"` normalises over the tokens of the step.

    Needs a critic, which the trainer provides (`[credit.critic]`); it learns A_t + V_t at first tokens only. Computed
    in float64. Raises ConfigError if `aux["values"]` is missing, TrainingError if a reward is not finite.
    """
    check_range("turn_gae", 0.0, 1.0, gamma=gamma, lam=lam)
    check_knob("turn_gae", "scale", scale, ("std", "none"))
    step = turns_of(groups, scores)
    values = step.token_predictions("turn_gae", aux, "values")
    turns = _by_turn(step, _ends(values, 0), gamma, lam, bootstrap)
    raw = [np.full(len(own), value) for own, value in zip(values, turns, strict=True)]
    return step.split(step.over_tokens(raw, scale, eps, among=step.valued))


def _bilevel_targets(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    token_gamma: float = 1.0,
    token_lam: float = 0.95,
    bootstrap: bool = False,
    **_: Any,
) -> Advantages:
    step = turns_of(groups, scores)
    values = step.token_predictions("bilevel_gae", aux, "values")
    turns = _by_turn(step, _ends(values, -1), gamma, lam, bootstrap)
    return _targets(step, values, _inside(step, values, turns, token_gamma, token_lam))


@declare(at({7: CRITIC}), at({7: CRITIC}, token_gamma=0.9, token_lam=1.0))
@learned("critic", "turnstile.trainer.critic:Critic", _bilevel_targets)
def bilevel_gae(
    groups: Sequence[Group],
    scores: Scores,
    aux: Mapping[str, Any],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    token_gamma: float = 1.0,
    token_lam: float = 0.95,
    bootstrap: bool = False,
    scale: Scale = "none",
    eps: Eps = 1e-8,
) -> Advantages:
    """A_n = delta_n + token_gamma token_lam A_{n+1}, delta_n = token_gamma V_{n+1} - V_n, within each turn.

    This is bi-level GAE: over turns, then over the tokens of each turn (VAGEN, arXiv 2510.16907). At the last token of
    turn t, A_n is the advantage A_t of the turn, from GAE over turns with `gamma` and `lam`.

    The value of a turn is the one before its last token, so that nothing between its first and last token counts twice.
    With both lam = 1 and both gamma = 1 this is `gae`. Rewards enter through the turns only. With `bootstrap`, an
    episode that a limit stopped ends with the value of its last turn instead of 0. `scale = "std"` normalises over the
    tokens of the step.

    Needs a critic, which the trainer provides (`[credit.critic]`); it learns A_n + V_n. Computed in float64. Raises
    ConfigError if `aux["values"]` is missing, TrainingError if a reward is not finite.
    """
    check_range("bilevel_gae", 0.0, 1.0, gamma=gamma, lam=lam, token_gamma=token_gamma, token_lam=token_lam)
    check_knob("bilevel_gae", "scale", scale, ("std", "none"))
    step = turns_of(groups, scores)
    values = step.token_predictions("bilevel_gae", aux, "values")
    raw = _inside(step, values, _by_turn(step, _ends(values, -1), gamma, lam, bootstrap), token_gamma, token_lam)
    return step.split(step.over_tokens(raw, scale, eps, among=step.valued))


def _by_token(step: Turns, values: Sequence[F64], gamma: float, lam: float, bootstrap: bool = False) -> list[F64]:
    """Return GAE over the trained tokens of each trajectory, [T] -> f64[n]; 0 in turns without values."""
    found = [np.zeros_like(own) for own in values]
    advantage = ahead = reward = 0.0
    goes_on = False
    for t in range(len(values) - 1, -1, -1):
        if step.last[t]:
            advantage, ahead, reward, goes_on = 0.0, 0.0, step.outcomes[t], bootstrap and bool(step.truncated[t])
        reward += step.rewards[t]  # a skipped turn's reward falls on the trained token before it
        if not step.valued[t]:
            continue
        if goes_on:
            ahead, goes_on = values[t][-1], False
        for n in range(len(values[t]) - 1, -1, -1):
            advantage = reward + gamma * ahead - values[t][n] + gamma * lam * advantage
            found[t][n], ahead, reward = advantage, values[t][n], 0.0
    return found


def _by_turn(step: Turns, values: F64, gamma: float, lam: float, bootstrap: bool = False) -> F64:
    """Return GAE over the trained turns of each trajectory, f64[T]; 0 for the others.

    The reward of an untrained turn is credited to the trained turn before it.
    """
    found = np.zeros(len(values))
    advantage = ahead = reward = 0.0
    goes_on = False
    for t in range(len(values) - 1, -1, -1):
        if step.last[t]:
            advantage, ahead, reward, goes_on = 0.0, 0.0, step.outcomes[t], bootstrap and bool(step.truncated[t])
        reward += step.rewards[t]
        if step.valued[t]:
            if goes_on:
                ahead, goes_on = values[t], False
            advantage = reward + gamma * ahead - values[t] + gamma * lam * advantage
            found[t], ahead, reward = advantage, values[t], 0.0
    return found


def _inside(step: Turns, values: Sequence[F64], turns: F64, gamma: float, lam: float) -> list[F64]:
    """Return the advantages of tokens, propagated back from each turn's last token to its first, [T] -> f64[n]."""
    found = [np.full(len(own), advantage) for own, advantage in zip(values, turns, strict=True)]
    for own, advantages, known in zip(values, found, step.valued, strict=True):
        for n in range(len(own) - 2, -1, -1) if known else ():
            advantages[n] = gamma * own[n + 1] - own[n] + gamma * lam * advantages[n + 1]
    return found


def _ends(values: Sequence[F64], place: int) -> F64:
    """Return the value before each turn's first (0) or last (-1) chosen token, f64[T]; 0 for a turn without any."""
    return np.array([own[place] if len(own) else 0.0 for own in values], dtype=np.float64)


def _targets(step: Turns, values: Sequence[F64], advantages: Sequence[F64]) -> Advantages:
    return step.split(_of_counted(step, [v + a for v, a in zip(values, advantages, strict=True)]), forced=np.nan)


def _of_counted(step: Turns, targets: Sequence[F64]) -> list[F64]:
    """Return the targets, with NaN (no target) for turns that are untrained or outside the baseline."""
    learned = step.in_baseline & step.valued
    return [own if counts else np.full(len(own), np.nan) for own, counts in zip(targets, learned, strict=True)]
