"""ArCHer's credit, which is the advantage of a whole turn according to a turn-level critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from turnstile.credit.base import Advantages, Scores, learned
from turnstile.credit.invariants import CRITIC, at, declare
from turnstile.credit.stats import F64, check_range
from turnstile.credit.turns import turns_of
from turnstile.types import Group

_SAID: tuple[Literal["q", "v"], ...] = ("q", "v")


def _bootstrap_targets(
    groups: Sequence[Group], scores: Scores, aux: Mapping[str, Any], *, gamma: float = 1.0, **_: Any
) -> list[F64]:
    """Return Q's targets, [trajectory] -> f64[K]: r_t + gamma V(s_{t+1}) with V from `aux`, or r_K + R at the end.

    NaN means no target. The reward of an untrained turn is credited to the trained turn before it.
    """
    step = turns_of(groups, scores)
    values = np.concatenate([*aux["v"], np.zeros(0)])
    found = np.full(len(values), np.nan)
    ahead = reward = 0.0
    for t in range(len(values) - 1, -1, -1):
        if step.last[t]:
            ahead, reward = 0.0, step.outcomes[t]
        reward += step.rewards[t]
        if step.valued[t]:
            found[t] = reward + gamma * ahead
            ahead, reward = float(values[t]), 0.0
    found[~step.in_baseline] = np.nan
    return np.split(found, np.cumsum([len(t.turns) for group in groups for t in group.trajectories])[:-1])


@declare(at({5: "rewards reach it through the critic alone, which has learned of earlier ones", 7: CRITIC}))
@learned("critic", "turnstile.trainer.utterance:UtteranceCritic", _bootstrap_targets)
def utterance_critic(
    groups: Sequence[Group], scores: Scores, aux: Mapping[str, Any], *, gamma: float = 1.0
) -> Advantages:
    """A_t = Q(s_t, a_t) - V(s_t), given to every token of turn t (ArCHer, arXiv 2402.19446).

    This is an actor-critic whose actions are whole utterances, which a token-level policy produces. Q and V are each
    the smaller of two heads. Q learns r_t + gamma V'(s_{t+1}) and V learns Q'(s_t, a_t), where V' and Q' are slow
    copies. Learning therefore needs only single turns, whichever policy sampled them. `gamma` discounts turns, and the
    outcome falls on the last turn. Rewards enter A_t only through the critic.

    Needs a critic, which the trainer provides and fits to the step before using it (`[credit.critic]`). Raises
    ConfigError if `aux["q"]` or `aux["v"]` is missing, TrainingError if a reward or a value is not finite.
    """
    check_range("utterance_critic", 0.0, 1.0, gamma=gamma)
    step = turns_of(groups, scores)
    q, v = (step.turn_predictions("utterance_critic", aux, name) for name in _SAID)
    return step.to_tokens(q - v)
