"""Credit by what learned parts say, against numbers computed by hand."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from made_groups import attempt, by_turn, group_of, nested, score
from turnstile.credit.base import estimate, targets_of
from turnstile.credit.gae import gae
from turnstile.credit.implicit_step import implicit_step
from turnstile.credit.progress_attribution import progress_attribution
from turnstile.credit.rloo import rloo
from turnstile.credit.turn_return import turn_return
from turnstile.credit.utterance_critic import utterance_critic
from turnstile.errors import ConfigError, TrainingError
from turnstile.lookup import part_of

G = group_of(attempt(0, [2, 1]), attempt(1, [1, 1, 2]), attempt(2, [1]))
SCORES = [[score(1.0, [0, 0]), score(0.0, [0, 0, 0]), score(0.5, [0])]]
LOST = {"outcome": None, "in_baseline": False, "in_gradient": False}


def arrays(*turns: Sequence[float]) -> list[np.ndarray[Any, Any]]:
    return [np.array(own, dtype=np.float32) for own in turns]


# by turn 3, -1 | 0, 1, 2 | 4: means 1, 1, 4
REWARDS = {"implicit": [arrays([1, 2], [-1]), arrays([0], [1], [1, 1]), arrays([4])]}


def test_learned_parts_are_named() -> None:
    parts = [part_of(each) for each in (gae, implicit_step, utterance_critic, progress_attribution, rloo)]
    assert [part and (part.section, part.path.partition(":")[2]) for part in parts] == [
        ("critic", "Critic"), ("reward_model", "ImplicitReward"), ("critic", "UtteranceCritic"),
        ("critic", "ProgressEstimator"), None,
    ]  # fmt: skip
    assert part_of(functools.partial(implicit_step, omega=2.0)) == parts[1]
    assert targets_of(implicit_step) is None


def test_implicit_step_by_hand() -> None:
    # outcomes above the others' mean: 3/4, -3/4, 0. Rewards less 5/2 | 5/2 | 1: 1/2, -7/2 | -5/2, -3/2, -1/2 | 3
    found = by_turn(implicit_step([G], SCORES, REWARDS, omega=2.0, gamma=0.0))
    assert found[0] == pytest.approx([0.75 + 1, 0.75 - 7])
    assert found[1] == pytest.approx([-0.75 - 5, -0.75 - 3, -0.75 - 1])
    assert found[2] == pytest.approx([0 + 6])
    found = by_turn(implicit_step([G], SCORES, REWARDS, gamma=0.5))
    assert found[0] == pytest.approx([0.75 + 0.5 - 1.75, 0.75 - 3.5])
    assert found[1] == pytest.approx([-0.75 - 2.5 - 0.75 - 0.125, -0.75 - 1.5 - 0.25, -0.75 - 0.5])


def test_without_weight_it_is_leave_one_out() -> None:
    assert nested(implicit_step([G], SCORES, REWARDS, omega=0.0)) == nested(rloo([G], SCORES))


def test_what_does_not_count_has_no_share_in_the_mean() -> None:
    scores = [[SCORES[0][0], SCORES[0][1], replace(SCORES[0][2], **LOST)]]
    found = by_turn(implicit_step([G], scores, REWARDS, gamma=0.0))
    assert found[0] == pytest.approx([1 + 3 - 1, 1 - 1 - 1])
    assert found[2] == [0.0]
    alone = [[SCORES[0][0], *(replace(each, **LOST) for each in SCORES[0][1:])]]
    assert by_turn(implicit_step([G], alone, REWARDS))[0] == [0.0, 0.0]


WORTH = {"q": arrays([3, 1], [0, 0.5, 2], [4]), "v": arrays([1, 1], [0.5, 0.5, 0], [1])}


def test_utterance_critic_by_hand() -> None:
    found = by_turn(utterance_critic([G], SCORES, WORTH))
    assert found == [[2.0, 0.0], [-0.5, 0.0, 2.0], [3.0]]


def test_its_targets_are_bootstrapped_turn_by_turn() -> None:
    scores = [[score(1.0, [0.5, 0]), score(0.0, [0, 2, 0]), score(0.5, [0])]]
    learn = targets_of(functools.partial(utterance_critic, gamma=0.5))
    assert learn is not None
    found = [own.tolist() for own in learn([G], scores, WORTH)]
    assert found == [[0.5 + 0.5, 1.0], [0.25, 2.0 + 0.0, 0.0], [0.5]]
    passed = replace(G.trajectories[1].turns[1], trainable=False)
    turns = (G.trajectories[1].turns[0], passed, G.trajectories[1].turns[2])
    other = replace(G, trajectories=(G.trajectories[0], replace(G.trajectories[1], turns=turns)))
    lost = [[replace(scores[0][0], **LOST), scores[0][1]]]
    found = [own.tolist() for own in learn([other], lost, {"v": WORTH["v"][:2]})]
    assert np.isnan(found[0]).all()
    assert found[1][0] == 2.0  # what the turn that is passed over brings, and half of V behind it
    assert np.isnan(found[1][1])


CONTRIBUTED = {"progress": arrays([0.5, 0.25], [0.25, 0, -0.5], [1])}


def test_progress_attribution_by_hand() -> None:
    # with what is left of the outcomes 1, 0, 1/2 on last turns: 1/2 1/2 | 1/4 0 -1/4 | 1/2. To go: 1 1/2 | 0 -1/4 -1/4
    # | 1/2. Means by index: 1/2, 1/8, and a third turn with nobody beside it
    found = by_turn(progress_attribution([G], SCORES, CONTRIBUTED, scale="none"))
    assert found == [[0.5, 0.375], [-0.5, -0.375, 0.0], [0.0]]
    bare = by_turn(progress_attribution([G], SCORES, CONTRIBUTED, rest="none", scale="none"))
    assert bare == [[0.25, 0.375], [-0.75, -0.375, 0.0], [0.5]]  # to go: 3/4 1/4 | -1/4 -1/2 -1/2 | 1
    deviations = by_turn(progress_attribution([G], SCORES, CONTRIBUTED, eps=0.0))
    assert deviations[0] == pytest.approx([1.0, 1 / 2**0.5])  # of 1, 0, 1/2: 1/2


def test_progress_attribution_adds_step_rewards_and_discounts_both() -> None:
    scores = [[score(1.0, [1, 0]), score(0.0, [0, 0, 2]), score(0.5, [0])]]
    knobs = {"alpha": 2.0, "gamma": 0.5, "rest": "none", "scale": "none"}
    # twice the contributions and the rewards: 2 1/2 | 1/2 0 1 | 2. To go: 9/4 1/2 | 3/4 1/2 1 | 2
    found = by_turn(progress_attribution([G], scores, CONTRIBUTED, **knobs))
    assert [own[0] for own in found] == pytest.approx([9 / 4 - 5 / 3, 3 / 4 - 5 / 3, 2 - 5 / 3])
    assert found[0][1] == found[1][1] == 0.0


def test_what_contributions_leave_makes_every_attempt_whole() -> None:
    """First turns are compared by the whole total, whatever the estimator says."""
    scores = [[score(1.0, [1, 0]), score(0.0, [0, 0, 2]), score(0.5, [0])]]
    found = by_turn(progress_attribution([G], scores, CONTRIBUTED))
    plain = by_turn(turn_return([G], scores))
    assert [own[0] for own in found] == pytest.approx([own[0] for own in plain])
    silent = {"progress": [np.zeros(n, np.float32) for n in (2, 3, 1)]}
    assert nested(progress_attribution([G], scores, silent)) == nested(turn_return([G], scores))
    assert not np.concatenate(by_turn(progress_attribution([G], SCORES, silent, rest="none"))).any()


def test_contributions_of_what_does_not_count_have_no_share() -> None:
    scores = [[SCORES[0][0], SCORES[0][1], replace(SCORES[0][2], **LOST)]]
    found = by_turn(progress_attribution([G], scores, CONTRIBUTED, scale="none"))
    assert found == [[0.5, 0.375], [-0.5, -0.375, 0.0], [0.0]]  # the mean of 1 and 0
    hoped = targets_of(functools.partial(progress_attribution, gamma=0.5))
    assert hoped is not None
    assert hoped([G], scores, {}).tolist() == pytest.approx([1.0, 0.0, np.nan], nan_ok=True)


def test_a_step_without_data() -> None:
    nothing: dict[str, list[Any]] = {"implicit": [], "q": [], "v": [], "progress": []}
    for estimator in (implicit_step, utterance_critic, progress_attribution):
        assert estimate(estimator, [], [], nothing, {}) == ([], {})


def test_what_is_missing_or_broken_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"needs the rewards of an implicit process reward: the trainer learns it"):
        implicit_step([G], SCORES, {})
    with pytest.raises(TrainingError, match=r"implicit process reward are not finite; lower credit\.reward_model\.lr"):
        implicit_step([G], SCORES, {"implicit": [arrays([1, np.nan], [1]), *REWARDS["implicit"][1:]]})
    with pytest.raises(ConfigError, match="omega = -1"):
        implicit_step([G], SCORES, REWARDS, omega=-1.0)
    with pytest.raises(ConfigError, match="needs the values of a critic of turns"):
        utterance_critic([G], SCORES, {"q": WORTH["q"]})
    with pytest.raises(ValueError, match=r"not \[trajectory\] -> f32\[K\]"):
        utterance_critic([G], SCORES, {**WORTH, "v": WORTH["v"][:2]})
    with pytest.raises(TrainingError, match=r"not finite; lower credit\.critic\.lr"):
        utterance_critic([G], SCORES, {**WORTH, "q": arrays([3, np.inf], [0, 0.5, 2], [4])})
    with pytest.raises(ConfigError, match="'progress_attribution' needs the contributions of turns"):
        progress_attribution([G], SCORES, {})
    with pytest.raises(TrainingError, match=r"the contributions of turns are not finite; lower credit\.critic\.lr"):
        progress_attribution([G], SCORES, {"progress": arrays([0.5, np.nan], [0, 0, 0], [1])})
    with pytest.raises(ConfigError, match="rest = 'lost' is not known"):
        progress_attribution([G], SCORES, CONTRIBUTED, rest="lost")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="alpha = -1"):
        progress_attribution([G], SCORES, CONTRIBUTED, alpha=-1.0)
