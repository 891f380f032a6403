"""The process reward that is learned from outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from made_groups import attempt, group_of, score
from networks import network, plain_logprobs, stored
from turnstile.batching.rows import rows_of
from turnstile.credit.base import Advantages
from turnstile.errors import TrainingError
from turnstile.losses.check import sample_batch
from turnstile.models.adapt import choose_trainable
from turnstile.trainer.implicit import ImplicitReward, outcome_cross_entropy
from turnstile.trainer.learner import Learner, LearnerConfig
from turnstile.trainer.optim import constant
from turnstile.types import Group, Sampling, Score, Trajectory

LENGTHS = ([2, 3], [1, 2, 2], [4], [1, 1, 3])


def told(number: int, lengths: Sequence[int]) -> Trajectory:
    """Attempts that say different things, so that they can be told apart."""
    plain = attempt(number, lengths)
    turns = [
        replace(turn, completion=replace(turn.completion, token_ids=turn.completion.token_ids % 7 + 5 + 8 * number))
        for turn in plain.turns
    ]
    return replace(plain, turns=tuple(turns))


GROUPS = [group_of(*(told(i, tokens) for i, tokens in enumerate(LENGTHS)))]
SCORES = [[score(float(i % 2), [0.0] * len(tokens)) for i, tokens in enumerate(LENGTHS)]]


def learner(train: Any = "all", *, budget: int = 4096, **knobs: Any) -> Learner:
    model = network()
    plan = LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=9, budget=budget)
    return Learner(model, choose_trainable(model, train, **knobs), plan)


def reward(policy: Learner | None = None, **manner: Any) -> ImplicitReward:
    return ImplicitReward(policy or learner(), Sampling(), **{"lr": 3e-3, "beta": 0.5, **manner})


def step(part: ImplicitReward, groups: Sequence[Group] = GROUPS, scores: Any = SCORES) -> dict[str, float]:
    return part.update(groups, scores, part.predict(groups, scores))


def flat(values: Advantages) -> np.ndarray:
    return np.concatenate([own for turns in values for own in turns])


def sums(part: ImplicitReward) -> list[float]:
    return [float(sum(own.sum() for own in turns)) for turns in part.predict(GROUPS, SCORES)["implicit"]]


@pytest.mark.parametrize("objective", ["cross_entropy", "dpo"])
def test_it_begins_at_nothing_and_learns_to_tell_outcomes_apart(objective: Any) -> None:
    part = reward(objective=objective)
    assert [[len(own) for own in turns] for turns in part.predict(GROUPS, SCORES)["implicit"]] == list(LENGTHS)
    np.testing.assert_allclose(flat(part.predict(GROUPS, SCORES)["implicit"]), 0.0, atol=1e-6)
    first = step(part)
    for _ in range(15):
        last = step(part)
    assert last["implicit/loss"] < 0.5 * first["implicit/loss"]
    assert last["implicit/accuracy"] == 1.0
    assert last["implicit/skipped"] == 0.0
    bad, good, worse, better = sums(part)
    assert min(good, better) > max(bad, worse)


def test_the_rewards_are_beta_times_the_log_ratio_of_each_token() -> None:
    part = reward()
    begin = {name: value.clone() for name, value in part._phi.model.state_dict().items()}
    step(part)
    now = {name: value.clone() for name, value in part._phi.model.state_dict().items()}
    found = part.predict(GROUPS, SCORES)["implicit"]
    for trajectory, turns in zip(GROUPS[0].trajectories, found, strict=True):
        (row,) = rows_of(trajectory, [np.zeros(len(t.completion.token_ids), np.float32) for t in trajectory.turns])
        with torch.no_grad():
            part._phi.model.load_state_dict(begin)
            start = plain_logprobs(part._phi.model, row)
            part._phi.model.load_state_dict(now)
            ratio = plain_logprobs(part._phi.model, row) - start
        np.testing.assert_allclose(np.concatenate(turns), 0.5 * ratio, atol=1e-4)
        assert ratio.abs().max() > 1e-3


def test_the_old_reference_is_the_policy_of_now() -> None:
    policy = learner()
    part = reward(policy, reference="old")
    step(part)
    with torch.no_grad():
        for parameter, phi in zip(policy.parameters, part._phi.parameters, strict=True):
            parameter.copy_(phi)
    np.testing.assert_allclose(flat(part.predict(GROUPS, SCORES)["implicit"]), 0.0, atol=1e-6)


def test_the_policy_is_not_moved_and_what_is_frozen_is_shared() -> None:
    policy = learner("top", top_layers=1)
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    part = reward(policy)
    step(part)
    assert all((a == b).all() for a, b in zip(before, policy.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    pairs = list(zip(policy.model.parameters(), part._phi.model.parameters(), strict=True))
    assert {own is phi for own, phi in pairs if not own.requires_grad} == {True}
    assert {own is phi for own, phi in pairs if own.requires_grad} == {False}
    assert flat(part.predict(GROUPS, SCORES)["implicit"]).any()


@pytest.mark.parametrize("reference", ["start", "old"])
def test_its_state_goes_through_a_file_bit_by_bit(reference: Any) -> None:
    part = reward(reference=reference)
    step(part)
    policy = learner()
    with torch.no_grad():
        policy.parameters[0].add_(0.01)  # a run goes on from a policy that has moved
    same = reward(policy, reference=reference)
    same.restore(stored(part.state()))
    part._policy = policy
    step(part)
    step(same)  # with the optimiser's moments
    assert (
        flat(same.predict(GROUPS, SCORES)["implicit"]).tolist()
        == flat(part.predict(GROUPS, SCORES)["implicit"]).tolist()
    )


def test_packing_changes_nothing() -> None:
    one, many = reward(lr=1e-4), reward(learner(budget=64), lr=1e-4)
    step(one)
    step(many)
    np.testing.assert_allclose(
        flat(one.predict(GROUPS, SCORES)["implicit"]),
        flat(many.predict(GROUPS, SCORES)["implicit"]),
        atol=1e-4,
        rtol=1e-2,
    )


def test_what_does_not_count_is_not_learned() -> None:
    part = reward()
    nothing = [[replace(s, in_baseline=False, in_gradient=False, outcome=None) for s in SCORES[0]]]
    assert step(part, GROUPS, nothing) == {}
    assert step(part, [], []) == {}
    np.testing.assert_allclose(flat(part.predict(GROUPS, SCORES)["implicit"]), 0.0, atol=1e-6)


def test_an_outcome_that_is_no_label_is_one_clear_error() -> None:
    scores: list[list[Score]] = [[replace(SCORES[0][0], outcome={"agent": -0.5}), *SCORES[0][1:]]]
    with pytest.raises(TrainingError, match=r"attempt 0: an outcome of -0\.5 is no label; credit\.reward_model\."):
        step(reward(), GROUPS, scores)
    assert step(reward(objective="dpo"), GROUPS, scores)["implicit/skipped"] == 0.0


def test_cross_entropy_by_hand() -> None:
    batch, logprobs = sample_batch()
    labels = (batch.trajectory % 2).double()
    batch = replace(batch, advantages=labels, weights=torch.full_like(batch.weights, 0.25))
    leaf = logprobs.clone().requires_grad_()
    loss, metrics = outcome_cross_entropy(leaf, batch, beta=0.5)
    (slope,) = torch.autograd.grad((loss * batch.weights).sum(), leaf)
    for trajectory in range(4):
        own = batch.trajectory == trajectory
        h = 0.5 * (logprobs - batch.extras["ref_logprobs"])[own].clamp(-20, 20).sum()
        label = float(trajectory % 2)
        p = torch.sigmoid(h)
        torch.testing.assert_close(loss.detach()[own], (-label * p.log() - (1 - label) * (1 - p).log()).expand(6))
        torch.testing.assert_close(slope[own], (0.25 * 0.5 * (p - label)).expand(6))
        assert set(metrics["accuracy"][own].tolist()) == {float((h > 0) == (label > 0.5))}
