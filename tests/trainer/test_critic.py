"""The value head that estimators learn from."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from made_groups import attempt, group_of, score
from networks import network, stored
from turnstile.credit.base import Advantages, targets_of
from turnstile.credit.gae import gae
from turnstile.credit.turns import turns_of
from turnstile.models.adapt import choose_trainable
from turnstile.trainer.critic import Critic
from turnstile.trainer.learner import Learner, LearnerConfig
from turnstile.trainer.optim import constant
from turnstile.types import Group, Score

LENGTHS = ([2, 3], [1, 2, 2], [4], [1, 1, 3])
GROUPS = [group_of(*(attempt(i, tokens) for i, tokens in enumerate(LENGTHS)))]
SCORES = [[score(float(i), [0.5] * len(tokens)) for i, tokens in enumerate(LENGTHS)]]
TARGETS = targets_of(functools.partial(gae, gamma=0.5, lam=1.0))  # then the targets are returns


def critic(targets: Any = TARGETS, *, budget: int = 4096, **knobs: Any) -> Critic:
    model = network()
    plan = LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=9, budget=budget)
    return Critic(Learner(model, choose_trainable(model, "all"), plan), targets, **{"lr": 0.05, "epochs": 20, **knobs})


def step(
    head: Critic, groups: Sequence[Group] = GROUPS, scores: Sequence[Sequence[Score]] = SCORES
) -> dict[str, float]:
    return head.update(groups, scores, {"values": head.values(groups)})


def flat(values: Advantages) -> np.ndarray:
    return np.concatenate([own for turns in values for own in turns])


def test_it_begins_at_nothing_and_learns_the_returns() -> None:
    head = critic()
    assert [[len(own) for own in turns] for turns in head.values(GROUPS)] == list(LENGTHS)
    assert not flat(head.values(GROUPS)).any()
    first = step(head)
    for _ in range(40):
        last = step(head)
    assert first["critic/explained"] == pytest.approx(0.0, abs=1e-6)
    assert first["critic/value"] == 0.0
    assert last["critic/explained"] > 0.9
    assert last["critic/loss"] < 0.1 * first["critic/loss"]


def test_clipped_a_value_moves_no_further_in_a_step() -> None:
    free, held = critic(lr=0.01, epochs=60), critic(lr=0.01, epochs=60, clip=0.1)
    for head in (free, held):
        step(head)
    wanted = np.abs(flat(free.values(GROUPS)))
    assert wanted.max() > 1.0
    assert np.median(np.abs(flat(held.values(GROUPS)))) < 0.2 < np.median(wanted)
    before = flat(held.values(GROUPS))
    step(held)
    assert np.abs(flat(held.values(GROUPS))).mean() > np.abs(before).mean()  # the next step goes on from there


def test_the_order_of_values_is_that_of_the_trajectories() -> None:
    head = critic()
    step(head)
    alone = [head.values([replace(GROUPS[0], trajectories=(t,))])[0] for t in GROUPS[0].trajectories]
    np.testing.assert_allclose(flat(head.values(GROUPS)), flat(alone), atol=1e-5)
    assert len(np.unique(flat(alone).round(4))) > 4  # they differ, or the comparison would say nothing


def test_packing_changes_nothing() -> None:
    one, many = critic(), critic(budget=64)
    step(one)
    step(many)
    np.testing.assert_allclose(flat(one.values(GROUPS)), flat(many.values(GROUPS)), atol=1e-4)


def test_the_policy_is_not_moved() -> None:
    head = critic()
    before = [parameter.detach().clone() for parameter in head._learner.model.parameters()]
    step(head)
    after = list(head._learner.model.parameters())
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in after)


def test_its_state_goes_through_a_file_bit_by_bit() -> None:
    head, other = critic(), critic()
    step(head)
    other.restore(stored(head.state()))
    assert flat(other.values(GROUPS)).tolist() == flat(head.values(GROUPS)).tolist()
    step(head)
    step(other)  # with the optimiser's moments
    assert flat(other.values(GROUPS)).tolist() == flat(head.values(GROUPS)).tolist()
    critic().restore(stored(critic().state()))  # of a head that never learned


def test_what_has_no_target_is_not_learned() -> None:
    def first_turns(groups: Sequence[Group], scores: Any, aux: Mapping[str, Any]) -> Advantages:
        found = turns_of(groups, scores)
        return found.split(
            [
                np.full(len(turn.completion.token_ids), 7.0 if index == 0 else np.nan)
                for turn, index in zip(found.turns, found.index, strict=True)
            ]
        )

    metrics = step(critic(first_turns))
    assert metrics["critic/loss"] == 49.0
    assert metrics["critic/explained"] == 0.0
    nothing = [[replace(s, in_baseline=False, in_gradient=False, outcome=None) for s in SCORES[0]]]
    head = critic()
    assert step(head, GROUPS, nothing) == {}
    assert step(head, [], []) == {}
    assert not flat(head.values(GROUPS)).any()
