"""Losses through rows, weights, forest and a softmax policy: at the policy that played, and after it has moved."""

from __future__ import annotations

import numpy as np
import pytest

from turnstile.batching import weights
from turnstile.lab.loss_study import follows_advantage, measure_loss, study_losses
from turnstile.lab.losses import LossBench, every_loss, gradients, loss_bench, loss_subject
from turnstile.lab.measure import Subject, credit
from turnstile.lab.processes import make
from turnstile.lab.study import Setting
from turnstile.lookup import KINDS, resolve

SETTING = Setting(process=make("stopping"), size=4, groups=256)


@pytest.fixture(scope="module")
def still() -> LossBench:
    return loss_bench(SETTING)


@pytest.fixture(scope="module")
def moved() -> LossBench:
    return loss_bench(SETTING, drift=0.3)


def test_the_whole_way_of_a_step_gives_the_estimators_gradient(still: LossBench) -> None:
    """torch's gradient through batches equals the sum over tokens of advantage times score."""
    values, _ = credit(Subject(name="rloo", estimator=resolve("credit", "rloo")), still.drawn)
    assert gradients(loss_subject("reinforce"), still) == pytest.approx(still.drawn.gradients(values), abs=1e-6)


def test_every_loss_that_follows_advantages_is_reinforce_where_the_policy_stands(still: LossBench) -> None:
    plain = gradients(loss_subject("reinforce"), still)
    for each in (loss_subject("ppo"), loss_subject("ppo", {"dual_clip": 3.0})):
        assert gradients(each, still) == pytest.approx(plain, abs=1e-6)
        assert measure_loss(each, still).bias < 1e-4


def test_a_policy_that_moved_is_judged_where_it_stands(moved: LossBench) -> None:
    plain, clipped = (measure_loss(loss_subject(kind), moved) for kind in ("reinforce", "ppo"))
    assert plain.biased  # nothing makes good that others played
    assert clipped.length < plain.length  # the clip cuts gradients
    assert np.abs(moved.theta).max() > 0.1


def test_a_regulariser_does_not_follow_advantages(still: LossBench) -> None:
    assert not follows_advantage(loss_subject("kl"), still)
    assert follows_advantage(loss_subject("ppo"), still)


def test_weights_by_trajectory_turn_the_gradient_where_lengths_differ() -> None:
    found = measure_loss(loss_subject("reinforce"), loss_bench(SETTING, weights=weights.trajectory))
    assert found.biased  # the mean over each response favours short ones that win, long ones that lose
    constant = loss_bench(SETTING, weights=lambda rows: weights.constant(rows, divisor=10.0))
    assert not measure_loss(loss_subject("reinforce"), constant).biased


def test_the_study_names_every_loss() -> None:
    setting = Setting(process=make("stopping", horizon=2), size=2, groups=64)
    lines = study_losses(every_loss(), [setting])
    assert {line.kind for line in lines} == set(KINDS["loss"])
    assert {line.column for line in lines} == {"stopping", "stopping +0.03", "stopping +0.1"}
    assert all(line.figures is not None for line in lines), [line.refused for line in lines if line.refused]
