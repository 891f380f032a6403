"""Losses that follow no advantage, against what they regularise; and factors where a sampler is off the trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from turnstile.errors import ConfigError
from turnstile.lab.loss_study import (
    BARE,
    every_factor,
    factor_subject,
    measure_loss,
    study_factors,
    study_whole,
)
from turnstile.lab.losses import (
    LossBench,
    LossSubject,
    declared_losses,
    every_loss,
    gradients,
    log_policy,
    loss_bench,
    loss_subject,
    visits,
)
from turnstile.lab.processes import make
from turnstile.lab.regularisers import REGULARISERS, VALUE, measure_regulariser
from turnstile.lab.study import Setting
from turnstile.lab.world import F64
from turnstile.lookup import KINDS

SETTING = Setting(process=make("stopping"), size=4, groups=256)
NODES = [kind for kind in KINDS["loss"] if kind in REGULARISERS]


@pytest.fixture(scope="module")
def still() -> LossBench:
    return loss_bench(SETTING)


@pytest.fixture(scope="module")
def moved() -> LossBench:
    return loss_bench(SETTING, drift=0.1)


@pytest.mark.parametrize("subject", [each for kind in NODES for each in declared_losses(kind)], ids=lambda s: s.label)
def test_a_regulariser_has_the_gradient_of_what_it_regularises(
    subject: LossSubject, still: LossBench, moved: LossBench
) -> None:
    for bench in (still, moved):  # also where the policy has moved: the ratio makes that good
        found = measure_loss(subject, bench)
        assert not found.biased
        assert found.length == pytest.approx(1.0, abs=max(0.01, 4 * found.length_se))


def test_a_wrong_regulariser_is_found_wrong(still: LossBench) -> None:
    """The divergence from another policy than the one it is held against."""
    found = measure_regulariser(LossSubject(name="distill", loss=loss_subject("self_distill").loss), still)
    assert found.biased


def test_estimators_of_one_divergence_differ_in_noise_alone(still: LossBench) -> None:
    k1, k3 = (measure_loss(loss_subject("forward_kl", {"estimator": each}), still) for each in ("k1", "k3"))
    assert k1.episodes > 3 * k3.episodes
    assert k1.cosine == pytest.approx(k3.cosine, abs=0.01)


def expectation(kind: str, bench: LossBench, theta: F64) -> float:
    """What a regulariser comes to over an episode of the policy `theta`, all paths listed."""
    world = bench.world
    numbers = REGULARISERS[kind](log_policy(torch.from_numpy(theta), torch.from_numpy(world.node)), bench, {}).numpy()
    return float(visits(world, world.probabilities(world.policy(theta))) @ numbers)


@pytest.mark.parametrize("kind", ["kl", "entropy", "forward_kl"])
def test_the_objective_of_whole_episodes_by_differences(kind: str, still: LossBench) -> None:
    """The exact gradient agrees with what small changes of each logit do to the expectation."""
    step, slopes = 1e-5, []
    for logit in np.eye(len(still.theta)) * step:
        ends = [expectation(kind, still, still.theta + sign * logit) for sign in (1, -1)]
        slopes.append(-(ends[0] - ends[1]) / (2 * step))
    exact = np.array(slopes)
    mean = still.controls.mean(gradients(loss_subject(kind), still)).mean
    found = measure_regulariser(loss_subject(kind), still, whole=True)
    assert found.length == pytest.approx(float(mean @ exact / (exact @ exact)), abs=1e-4)


def test_tokens_do_not_answer_for_the_states_they_lead_to() -> None:
    """A bonus for each token's entropy leaves out that going on brings more tokens, each with its own."""
    lines = study_whole(every_loss(), [SETTING])
    assert {line.kind for line in lines} == set(REGULARISERS)
    entropy = next(line.figures for line in lines if line.kind == "entropy")
    assert entropy is not None
    assert entropy.biased
    assert entropy.cosine < 0.5


def test_the_value_loss_learns_the_exact_value(still: LossBench, moved: LossBench) -> None:
    plain, cut = ({"clip": None}, {"clip": 0.05})
    for bench in (still, moved):
        found = measure_loss(loss_subject(VALUE, plain), bench)
        assert not found.biased
        assert found.length == pytest.approx(1.0, abs=4 * found.length_se)
    assert not measure_loss(loss_subject(VALUE, cut), still).biased  # nothing has moved yet
    assert measure_loss(loss_subject(VALUE, cut), moved).biased


def test_an_objective_at_rest_is_one_clear_error(still: LossBench) -> None:
    wide = loss_subject("entropy_band", {"low": 0.0, "high": 9.0})
    with pytest.raises(ConfigError, match="its objective has no gradient here"):
        measure_loss(wide, still)


def test_a_regulariser_of_ones_own_is_refused_in_words(still: LossBench) -> None:
    mine = LossSubject(name="mine:calm", loss=loss_subject("entropy").loss)
    with pytest.raises(ConfigError, match="what it regularises the lab cannot tell"):
        measure_loss(mine, still)


@pytest.fixture(scope="module")
def off() -> LossBench:
    return loss_bench(SETTING, drift=0.3, proximal="trainer")


def test_a_sampler_off_the_trainer_biases_and_the_whole_ratio_makes_it_good(off: LossBench) -> None:
    bare = measure_loss(every_factor()[0], off)
    assert bare.biased
    whole = measure_loss(factor_subject("mis", {"cap": 1e6}), off)  # over trajectories
    assert not whole.biased
    assert whole.length == pytest.approx(1.0, abs=4 * whole.length_se)
    assert whole.episodes > bare.episodes  # and has its price
    assert measure_loss(factor_subject("tis"), off).biased  # earlier tokens led elsewhere


def test_where_sampler_and_trainer_agree_corrections_do_nothing(still: LossBench) -> None:
    agreed = loss_bench(SETTING, proximal="trainer")
    plain = measure_loss(every_factor()[0], agreed)
    for kind in ("tis", "mis", "icepop"):
        found = measure_loss(factor_subject(kind), agreed)
        assert found.length == pytest.approx(plain.length, abs=1e-5)
    assert measure_loss(factor_subject("high_entropy_only"), agreed).biased


def test_the_study_names_every_factor() -> None:
    lines = study_factors(every_factor(), [Setting(process=make("stopping", horizon=2), size=2, groups=64)])
    assert {line.kind for line in lines} == {BARE, *KINDS["loss_multiplier"]}
    assert {line.column for line in lines} == {"stopping", "stopping +0.1", "stopping +0.3"}
    assert all(line.figures is not None for line in lines)
