"""The contributions of turns that learn to add up to the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from made_groups import attempt, group_of, score
from networks import network, stored
from turnstile.credit.base import targets_of
from turnstile.credit.progress_attribution import progress_attribution
from turnstile.errors import TrainingError
from turnstile.models.adapt import choose_trainable
from turnstile.trainer.learner import Learner, LearnerConfig
from turnstile.trainer.optim import constant
from turnstile.trainer.progress import ProgressEstimator
from turnstile.trainer.turn_features import read_turn_features
from turnstile.types import Group, Score

LENGTHS = ([2, 3], [1, 2, 2], [4], [1, 1, 3])
GROUPS = [group_of(*(attempt(i, tokens) for i, tokens in enumerate(LENGTHS)))]
SCORES = [[score(float(i), [0.5] * len(tokens)) for i, tokens in enumerate(LENGTHS)]]


def estimator(*, budget: int = 4096, **knobs: Any) -> ProgressEstimator:
    model = network()
    plan = LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=9, budget=budget)
    learner = Learner(model, choose_trainable(model, "all"), plan)
    targets = targets_of(progress_attribution)
    assert targets is not None
    return ProgressEstimator(learner, targets, **{"lr": 1e-2, "epochs": 20, **knobs})


def step(
    part: ProgressEstimator, groups: Sequence[Group] = GROUPS, scores: Sequence[Sequence[Score]] = SCORES
) -> dict[str, float]:
    return part.update(groups, scores, part.predict(groups, scores))


def told(part: ProgressEstimator, groups: Sequence[Group] = GROUPS) -> list[np.ndarray]:
    found: list[np.ndarray] = part.predict(groups, SCORES)["progress"]
    return found


def test_it_begins_at_nothing_and_learns_to_add_up_to_the_outcomes() -> None:
    part = estimator()
    assert [len(own) for own in told(part)] == [len(tokens) for tokens in LENGTHS]
    assert not np.concatenate(told(part)).any()
    first = step(part)
    assert first["progress/loss"] == pytest.approx((0 + 1 + 4 + 9) / 4)  # the outcomes 0 to 3 against nothing
    assert first["progress/explained"] == pytest.approx(0.0, abs=1e-6)
    for _ in range(20):
        last = step(part)
    assert [own.sum() for own in told(part)] == pytest.approx([0, 1, 2, 3], abs=0.1)
    assert last["progress/explained"] > 0.99
    assert np.ptp(np.concatenate(told(part))) > 0.1  # no even share


def test_one_step_by_hand() -> None:
    """The last layer's bias sees the mean over attempts of 2 (sum - outcome) times the turns of each."""
    part = estimator(epochs=1)
    step(part)
    bias = part._head[-1].bias
    turns, outcomes = np.array([2, 3, 1, 3]), np.array([0.0, 1.0, 2.0, 3.0])
    assert bias.grad is not None
    assert float(bias.grad) == pytest.approx(float(np.mean(2 * (0 - outcomes) * turns)))
    assert float(bias.detach()) == pytest.approx(1e-2, rel=1e-4)  # Adam's first step, against the sign


def test_the_policy_is_not_moved() -> None:
    part = estimator()
    before = [parameter.detach().clone() for parameter in part._learner.model.parameters()]
    step(part)
    after = list(part._learner.model.parameters())
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in after)


def test_packing_changes_nothing() -> None:
    one, many = estimator(epochs=3), estimator(epochs=3, budget=64)
    step(one)
    step(many)
    np.testing.assert_allclose(np.concatenate(told(one)), np.concatenate(told(many)), atol=1e-4)
    assert np.concatenate(told(one)).any()


def test_its_state_goes_through_a_file_bit_by_bit() -> None:
    part, other = estimator(epochs=3), estimator(epochs=3)
    step(part)
    other.restore(stored(part.state()))
    step(part)
    step(other)  # with the optimiser's moments
    assert np.concatenate(told(other)).tolist() == np.concatenate(told(part)).tolist()


def test_what_does_not_count_is_not_learned() -> None:
    part = estimator()
    nothing = [[replace(s, in_baseline=False, in_gradient=False, outcome=None) for s in SCORES[0]]]
    assert step(part, GROUPS, nothing) == {}
    assert step(part, [], []) == {}
    assert not np.concatenate(told(part)).any()
    one = estimator()
    lost = [[*nothing[0][:3], SCORES[0][3]]]
    assert step(one, GROUPS, lost)["progress/loss"] == pytest.approx(9.0)  # of the fourth alone


def test_turns_that_are_not_trained_contribute_nothing() -> None:
    passed = [replace(turn, trainable=False) for turn in GROUPS[0].trajectories[0].turns]
    silent = replace(GROUPS[0].trajectories[0], turns=tuple(passed))
    groups = [replace(GROUPS[0], trajectories=(silent, *GROUPS[0].trajectories[1:]))]
    part = estimator()
    assert step(part, groups)["progress/loss"] == pytest.approx((1 + 4 + 9) / 3)  # nobody speaks for the first
    found = told(part, groups)
    assert not found[0].any()
    assert found[1].all()
    assert read_turn_features(part._learner, groups).trajectory.tolist() == [1, 1, 1, 2, 3, 3, 3]


def test_an_outcome_that_is_too_large_is_one_clear_error() -> None:
    part = estimator()
    scores = [[replace(SCORES[0][0], outcome={"agent": 3e38}), *SCORES[0][1:]]]
    with pytest.raises(TrainingError, match="the progress estimator's gradient is not finite"):
        step(part, GROUPS, scores)
