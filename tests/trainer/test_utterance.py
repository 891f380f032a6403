"""The critic of whole turns."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm

from made_groups import attempt, group_of, score
from networks import network, stored
from turnstile.batching.rows import rows_of
from turnstile.credit.base import targets_of
from turnstile.credit.utterance_critic import utterance_critic
from turnstile.models.adapt import choose_trainable
from turnstile.trainer.learner import Learner, LearnerConfig
from turnstile.trainer.optim import constant
from turnstile.trainer.turn_features import read_turn_features
from turnstile.trainer.utterance import UtteranceCritic
from turnstile.types import F32, Group, Score

LENGTHS = ([2, 3], [1, 2, 2], [4], [1, 1, 3])
GROUPS = [group_of(*(attempt(i, tokens) for i, tokens in enumerate(LENGTHS)))]
SCORES = [[score(float(i), [0.5] * len(tokens)) for i, tokens in enumerate(LENGTHS)]]


def critic(*, budget: int = 4096, targets: Any = None, gamma: float = 1.0, **knobs: Any) -> UtteranceCritic:
    model = network()
    plan = LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=9, budget=budget)
    learner = Learner(model, choose_trainable(model, "all"), plan)
    targets = targets or targets_of(functools.partial(utterance_critic, gamma=gamma))
    return UtteranceCritic(learner, targets, **{"lr": 1e-2, "epochs": 20, "tau": 0.5, **knobs})


def step(
    heads: UtteranceCritic, groups: Sequence[Group] = GROUPS, scores: Sequence[Sequence[Score]] = SCORES
) -> dict[str, float]:
    return heads.update(groups, scores, heads.predict(groups, scores))


def flat(told: Mapping[str, Any]) -> np.ndarray:
    return np.concatenate([own for name in "qv" for own in told[name]])


def test_it_begins_at_nothing_and_learns_what_turns_are_worth() -> None:
    heads = critic()
    told = heads.values(GROUPS)
    assert [[len(own) for own in told[name]] for name in "qv"] == [[len(tokens) for tokens in LENGTHS]] * 2
    assert not flat(told).any()
    first = step(heads)
    for _ in range(30):
        last = step(heads)
    assert last["utterance/q_loss"] < 0.05 * first["utterance/q_loss"]
    told = heads.values(GROUPS)
    # what the last turn of each attempt brings is its outcome and its step reward; nothing random follows
    assert [own[-1] for own in told["q"]] == pytest.approx([0.5, 1.5, 2.5, 3.5], abs=0.5)


def test_states_are_read_before_a_turn_and_actions_over_it() -> None:
    heads = critic()
    seen = read_turn_features(heads._learner, GROUPS)
    model = heads._learner.model
    row = 0
    for trajectory in GROUPS[0].trajectories:
        (whole,) = rows_of(trajectory, [np.zeros(len(t.completion.token_ids), np.float32) for t in trajectory.turns])
        with torch.no_grad():
            tokens = torch.from_numpy(whole.token_ids).long()[None]
            hidden = model.get_decoder()(tokens, use_cache=False).last_hidden_state[0].float()
        for turn in range(len(trajectory.turns)):
            places = np.flatnonzero(whole.turn_ids == turn)
            read = layer_norm(hidden, hidden.shape[-1:])
            np.testing.assert_allclose(seen.before[row], read[places[0] - 1], atol=1e-4)
            both = torch.cat([read[places[0] - 1], read[places].mean(0)])
            np.testing.assert_allclose(seen.after[row], both, atol=1e-4)
            row += 1
    assert row == len(seen.turns) == 9


def test_packing_changes_nothing() -> None:
    one, many = critic(epochs=3), critic(epochs=3, budget=64)
    step(one)
    step(many)
    np.testing.assert_allclose(flat(one.values(GROUPS)), flat(many.values(GROUPS)), atol=1e-4)
    assert flat(one.values(GROUPS)).any()


def test_its_state_goes_through_a_file_bit_by_bit() -> None:
    heads, other = critic(epochs=3), critic(epochs=3)
    step(heads)
    other.restore(stored(heads.state()))
    step(heads)
    step(other)  # with the slow copies and the optimiser's moments
    assert flat(other.values(GROUPS)).tolist() == flat(heads.values(GROUPS)).tolist()


def test_what_does_not_count_is_not_learned() -> None:
    heads = critic()
    nothing = [[replace(s, in_baseline=False, in_gradient=False, outcome=None) for s in SCORES[0]]]
    assert step(heads, GROUPS, nothing) == {}
    assert step(heads, [], []) == {}
    assert not flat(heads.values(GROUPS)).any()
    passed = [replace(turn, trainable=False) for turn in GROUPS[0].trajectories[0].turns]
    silent = [replace(GROUPS[0], trajectories=(replace(GROUPS[0].trajectories[0], turns=tuple(passed)),))]
    assert step(heads, silent, [SCORES[0][:1]]) == {}


def test_the_targets_are_of_the_slow_copies() -> None:
    asked: list[list[F32]] = []

    def targets(groups: Sequence[Group], scores: Any, aux: Mapping[str, Any]) -> list[np.ndarray]:
        asked.append(aux["v"])
        return [np.full(len(own), 4.0) for own in aux["v"]]

    heads = critic(targets=targets, tau=1.0, epochs=2)
    step(heads)
    assert not np.concatenate(asked[0]).any()  # at first everything says 0
    still = critic(targets=targets, tau=1e-9, epochs=40)
    step(still)
    told = still.values(GROUPS)
    assert np.concatenate(told["q"]).mean() > 1.0  # q learned the targets, v the slow q, which has not moved
    assert np.abs(np.concatenate(told["v"])).max() < 1e-3
