"""Advantages over a critic's values, against numbers computed by hand."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from made_groups import attempt, group_of, nested, score
from turnstile.credit.base import targets_of
from turnstile.credit.gae import bilevel_gae, gae, turn_gae
from turnstile.credit.grpo import grpo
from turnstile.credit.samples import with_forced
from turnstile.errors import ConfigError, TrainingError
from turnstile.types import Stop

# one trajectory: two tokens, then one; r = (1, 0), R = 2; values 1, 2 | 3
G = group_of(attempt(0, [2, 1]))
SCORES = [[score(2.0, [1.0, 0.0])]]
AUX = {"values": [[np.array([1.0, 2.0], np.float32), np.array([3.0], np.float32)]]}


def run(estimator: Any, **knobs: Any) -> list[list[float]]:
    (found,) = nested(estimator([G], SCORES, AUX, **knobs))
    return found


def targets(estimator: Any, **knobs: Any) -> list[list[float]]:
    learn = targets_of(functools.partial(estimator, **knobs))
    assert learn is not None
    return nested(learn([G], SCORES, AUX))[0]


def test_gae_goes_from_sampled_token_to_sampled_token() -> None:
    # gamma 1/2, lam 1/2, from the back: 2 - 3 = -1; 1 + 3/2 - 2 = 1/2, - 1/4 = 1/4; 0 + 2/2 - 1 = 0, + 1/16
    assert run(gae, gamma=0.5, lam=0.5) == [pytest.approx([1 / 16, 1 / 4]), [-1.0]]
    assert targets(gae, gamma=0.5, lam=0.5) == [pytest.approx([17 / 16, 9 / 4]), [2.0]]


def test_with_lam_1_the_targets_are_the_returns() -> None:
    assert targets(gae, gamma=1.0, lam=1.0) == [[3.0, 3.0], [2.0]]
    assert targets(gae, gamma=0.5, lam=1.0) == [[1.0, 2.0], [2.0]]  # (1 + 2/2) / 2, 1 + 2/2, 2


def test_turn_gae_discounts_turns() -> None:
    # V 1, 3: 2 - 3 = -1; 1 + 3/2 - 1 = 3/2, - 1/4
    assert run(turn_gae, gamma=0.5, lam=0.5) == [[1.25, 1.25], [-1.0]]
    found = targets(turn_gae, gamma=0.5, lam=0.5)
    assert found[0][0] == 2.25
    assert np.isnan(found[0][1])
    assert found[1] == [2.0]


def test_bilevel_gae_ends_each_turn_in_the_turns_advantage() -> None:
    # turns with V 2, 3 before their last tokens: -1; 1 + 3/2 - 2 = 1/2, - 1/4. First token: 2/2 - 1 + 1/2 * 1/4
    assert run(bilevel_gae, gamma=0.5, lam=0.5, token_gamma=0.5, token_lam=1.0) == [[0.125, 0.25], [-1.0]]
    assert targets(bilevel_gae, gamma=0.5, lam=0.5, token_gamma=0.5, token_lam=1.0) == [[1.125, 2.25], [2.0]]


def test_with_every_lam_and_gamma_1_bilevel_gae_is_gae() -> None:
    assert run(bilevel_gae, lam=1.0, token_lam=1.0) == run(gae, lam=1.0) == [[2.0, 1.0], [-1.0]]


def test_scale_is_over_the_tokens_of_the_step() -> None:
    raw = np.array([1 / 16, 1 / 4, -1.0])
    found = run(gae, gamma=0.5, lam=0.5, scale="std", eps=0.0)
    assert [*found[0], *found[1]] == pytest.approx(((raw - raw.mean()) / raw.std()).tolist())


def test_the_reward_of_a_turn_without_tokens_is_not_lost() -> None:
    silent = group_of(attempt(0, [1, 0, 1]))
    values = {"values": [[np.zeros(1, np.float32), np.zeros(0, np.float32), np.zeros(1, np.float32)]]}
    for estimator in (gae, turn_gae):
        (found,) = nested(estimator([silent], [[score(1.0, [0, 5, 0])]], values, lam=0.0))
        assert found == [[5.0], [], [1.0]]


@pytest.mark.parametrize("estimator", [gae, turn_gae, bilevel_gae])
def test_turns_that_the_critic_does_not_know_are_passed_over(estimator: Any) -> None:
    told = attempt(0, [1, 3, 0, 1])
    turns = [replace(turn, trainable=t != 1) for t, turn in enumerate(told.turns)]
    passed = group_of(replace(told, turns=tuple(turns)))
    values = {"values": [[np.full(n, n == 1, np.float32) for n in (1, 3, 0, 1)]]}
    scores = [[score(1.0, [0, 0, 0, 0])]]
    (found,) = nested(estimator([passed], scores, values))
    assert found == [[0.0], [0.0, 0.0, 0.0], [], [0.0]]
    learn = targets_of(estimator)
    assert learn is not None
    (wanted,) = learn([passed], scores, values)
    assert (wanted[0][0], wanted[3][0]) == (1.0, 1.0)
    assert np.isnan(wanted[1]).all()


def test_a_forced_token_is_no_false_value_on_the_way() -> None:
    """V = .8 everywhere, no reward, stopped by a limit: with `bootstrap` there is nothing to learn, wherever tokens
    were forced."""
    told = with_forced(replace(attempt(0, [1, 2]), stop=Stop.TURNS), 1, extra=2)
    values = {"values": [[np.full(1, 0.8, np.float32), np.array([0.8, 0.8, 0, 0], np.float32)]]}
    scores = [[score(0.0, [0, 0])]]
    for estimator in (gae, turn_gae, bilevel_gae):
        (found,) = nested(estimator([group_of(told)], scores, values, lam=0.5, bootstrap=True))
        assert found == [[0.0], [0.0, 0.0, 0.0, 0.0]]
        learn = targets_of(estimator)
        assert learn is not None
        (wanted,) = learn([group_of(told)], scores, values, bootstrap=True)
        assert wanted[1][0] == pytest.approx(0.8)
        assert np.isnan(wanted[1][2:]).all()


def test_what_does_not_count_is_not_learned() -> None:
    lost = replace(score(0.0, [0, 0]), outcome=None, in_baseline=False, in_gradient=False)
    learn = targets_of(gae)
    assert learn is not None
    assert all(np.isnan(own).all() for own in learn([G], [[lost]], AUX)[0])
    assert nested(gae([G], [[lost]], AUX)) == [[[0.0, 0.0], [0.0]]]


def test_without_a_critic() -> None:
    assert targets_of(grpo) is None
    for estimator in (gae, turn_gae, bilevel_gae):
        with pytest.raises(ConfigError, match="needs the values of a critic"):
            estimator([G], SCORES, {})
        with pytest.raises(ValueError, match=r"not \[trajectory\]\[turn\]"):
            estimator([G], SCORES, {"values": [[np.zeros(1, np.float32)]]})


def test_values_that_are_not_finite() -> None:
    broken = {"values": [[np.array([np.nan, 0.0], np.float32), np.zeros(1, np.float32)]]}
    with pytest.raises(TrainingError, match=r"values of a critic are not finite; lower credit\.critic\.lr"):
        gae([G], SCORES, broken)


@pytest.mark.parametrize("stop", [Stop.TURNS, Stop.CONTEXT, Stop.TOKENS, Stop.TIMEOUT])
def test_an_episode_that_a_limit_stopped_might_have_gone_on(stop: Stop) -> None:
    # gamma 1/2, lam 1/2: 2 + 3/2 - 3 = 1/2; 1 + 3/2 - 2 = 1/2, + 1/8; 0 + 2/2 - 1 = 0, + 5/32. Turns, V 1, 3: 1/2; 13/8
    (whole,) = G.trajectories
    cut = replace(G, trajectories=(replace(whole, stop=stop),))
    for estimator, expected in ((gae, [[5 / 32, 5 / 8], [1 / 2]]), (turn_gae, [[13 / 8, 13 / 8], [1 / 2]])):
        knobs = {"gamma": 0.5, "lam": 0.5}
        (found,) = nested(estimator([cut], SCORES, AUX, bootstrap=True, **knobs))
        assert found == [pytest.approx(own) for own in expected]
        assert run(estimator, bootstrap=True, **knobs) == run(estimator, **knobs)  # it had come to its end
        (plain,) = nested(estimator([cut], SCORES, AUX, **knobs))
        assert plain == run(estimator, **knobs)
    learn = targets_of(functools.partial(gae, gamma=0.5, lam=1.0, bootstrap=True))
    assert learn is not None
    assert nested(learn([cut], SCORES, AUX))[0] == [[pytest.approx(11 / 8), pytest.approx(11 / 4)], [3.5]]
