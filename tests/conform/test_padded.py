"""Functions from padded rewards to advantages: how arrays lie, and what is seen of right and wrong ones."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from turnstile.conform.padded import PaddedEstimator, examine_padded, lay_out, roles
from turnstile.credit.grpo import grpo
from turnstile.credit.invariants import DoesNotApply, broken
from turnstile.credit.samples import sample_group, sample_score, sample_trajectory, sample_values
from turnstile.errors import ConfigError
from turnstile.types import Group, Task


def by_group(scores: Tensor, index: Any, mask: Tensor) -> Tensor:
    """The mean of each row's group, over rows that have an action."""
    counts = mask.sum(1) > 0
    means = [scores[torch.from_numpy(index == one) & counts].double().mean() for one in index]
    return torch.stack(means)


def their_grpo(token_level_rewards: Tensor, response_mask: Tensor, index: Any, eps: float = 1e-6) -> Tensor:
    scores = token_level_rewards.double().sum(1)
    centred = scores - by_group(scores, index, response_mask)
    centred[centred.abs() < 1e-8] = 0.0
    counts = response_mask.sum(1) > 0
    deviations = torch.stack([scores[torch.from_numpy(index == one) & counts].std() for one in index])
    return (centred / (deviations + eps))[:, None] * response_mask


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Discounts every column, whichever agent spoke there."""
    found, ahead = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        ahead = rewards[:, t] + gamma * ahead
        found[:, t] = ahead
    return found * 0 + rewards.sum(1, keepdim=True), found


def test_what_is_right_breaks_nothing() -> None:
    assert broken(examine_padded(their_grpo)) == {}


def test_arrays_lie_as_they_are_said_to() -> None:
    task = Task(id="t", env="e")
    group = Group(id="g", task=task, trajectories=(sample_trajectory([2, 1]), sample_trajectory([1])))
    scores = [sample_score(5.0, np.array([0.5, 0.25], np.float32)), sample_score(-1.0, np.zeros(1, np.float32))]
    arrays, places = lay_out([group], scores, {}, pad=1)
    assert places == [[(0, 2), (4, 5)], [(0, 1)]]  # two context tokens stand between the turns
    assert arrays["mask"].tolist() == [[1, 1, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    assert arrays["rewards"].tolist() == [[0, 0.5, 0, 0, 5.25, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0, 0]]
    assert arrays["index"].tolist() == ["g", "g"]
    late, _ = lay_out([group], scores, {}, late_outcome=True)
    assert late["rewards"].tolist() == [[0, 0.5, 0, 0, 0.25, 0, 5], [0, 0, -1, 0, 0, 0, 0]]
    values, _ = lay_out([group], scores, {"values": sample_values([group])})
    assert values["values"][0, 2:4].tolist() == [0.5, 0.5]
    assert values["values"][0, 4] == sample_values([group])[0][1][0]


def test_it_is_the_same_estimator_as_ours() -> None:
    rng = np.random.default_rng(3)
    groups = [sample_group(rng, "g", (3, 2, 4))]
    scores = [[sample_score(float(rng.normal()), np.zeros(n, np.float32)) for n in (3, 2, 4)]]
    theirs = PaddedEstimator(their_grpo)(groups, scores, {})
    expected = grpo(groups, scores)
    for own, other in zip(expected, theirs, strict=True):
        for a, b in zip(own, other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_what_is_lost_on_observations_and_what_they_discount_is_seen() -> None:
    def deaf(token_level_rewards: Tensor, response_mask: Tensor, index: Any) -> Tensor:
        return their_grpo(token_level_rewards * response_mask, response_mask, index)

    assert set(broken(examine_padded(deaf))) == {5}
    assert "at the outcome -10, on the observation after it" in broken(examine_padded(deaf))[5]
    seen = broken(examine_padded(functools.partial(returns_to_go, gamma=0.9)))
    assert "with 5 to 8 more observed tokens before every turn, the return of turn" in seen[1]


def test_a_failure_that_counts_and_padding_that_weighs_are_seen() -> None:
    def counts_all(rewards: Tensor, mask: Tensor, index: Any) -> Tensor:
        return their_grpo(rewards, torch.ones_like(mask), index) * mask

    seen = broken(examine_padded(counts_all))
    assert set(seen) == {4}
    assert "beside a fifth attempt that failed, the advantage of turn 0 of attempt 0 of g0 goes from" in seen[4]

    def weighs(rewards: Tensor, mask: Tensor, index: Any) -> Tensor:
        return their_grpo(rewards, mask, index) / rewards.shape[1]

    assert broken(examine_padded(weighs))[3].startswith("with more padding, the advantage of turn")


def test_results_of_other_shapes() -> None:
    groups = [sample_group(np.random.default_rng(0), "g", (2, 2))]
    scores = [[sample_score(1.0, np.zeros(2, np.float32)), sample_score(0.0, np.zeros(2, np.float32))]]

    def one_a_row(rewards: Tensor) -> Tensor:
        return rewards.sum(1)

    found = PaddedEstimator(one_a_row)(groups, scores, {})
    assert [[values.tolist() for values in turns] for turns in found][1] == [[0.0] * len(v) for v in found[1]]
    assert all((values == 1).all() for values in found[0])
    with pytest.raises(AssertionError, match=r"its result is \(3,\), not an array of \(2, "):
        PaddedEstimator(lambda rewards: torch.zeros(3))(groups, scores, {})
    with pytest.raises(DoesNotApply, match="gives no returns"):
        PaddedEstimator(one_a_row, part=1)(groups, scores, {})


def test_parameters_are_known_by_their_usual_names() -> None:
    def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor | None = None) -> None: ...

    assert roles(value_loss) == {
        "values": "predictions", "old_values": "values", "returns": "returns", "loss_mask": "mask"
    }  # fmt: skip
    bound = functools.partial(their_grpo, index=None)
    assert roles(bound) == {
        "token_level_rewards": "rewards",
        "response_mask": "mask",
    }
    with pytest.raises(ConfigError, match=r"returns_to_go wants 'horizon', which is no padded array .*horizon=VALUE"):
        roles(_wants_more)


def _wants_more(rewards: Tensor, horizon: int) -> None: ...


_wants_more.__qualname__ = "returns_to_go"
