"""Advantages against numbers computed by hand."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from turnstile.credit.base import Advantages, estimate
from turnstile.credit.grpo import grpo
from turnstile.credit.rloo import rloo
from turnstile.credit.samples import sample_trajectory
from turnstile.credit.turn_return import turn_return
from turnstile.errors import ConfigError, TrainingError
from turnstile.types import Group, Score, Task

TASK = Task(id="t", env="e")
A, B = 0, 1


def group(name: str, turns: Sequence[int]) -> Group:
    trajectories = tuple(sample_trajectory([2] * k, group=name, attempt=i) for i, k in enumerate(turns))
    return Group(id=name, task=TASK, trajectories=trajectories)


def score(outcome: float | None, steps: Sequence[float] = (0.0,), **flags: bool) -> Score:
    turn = np.array(steps, dtype=np.float32)
    if outcome is None:
        return Score(outcome=None, turn=turn, total=0.0, in_baseline=False, in_gradient=False)
    return Score(outcome={"agent": outcome}, turn=turn, total=outcome + float(turn.sum()), **flags)


def firsts(advantages: Advantages) -> list[float]:
    """The one value of each trajectory."""
    for turns in advantages:
        assert all((values == turns[0][0]).all() and values.dtype == np.float32 for values in turns)
    return [float(turns[0][0]) for turns in advantages]


def run(estimator: Any, rewards: Sequence[Sequence[float]], **knobs: Any) -> list[float]:
    groups = [group(f"g{i}", [1] * len(values)) for i, values in enumerate(rewards)]
    scores = [[score(v) for v in values] for values in rewards]
    advantages, state = estimate(functools.partial(estimator, **knobs), groups, scores, {}, {"kept": 1})
    assert state == {"kept": 1}
    return firsts(advantages)


def test_grpo_by_hand() -> None:
    # mean 1/2; squared deviations sum to 1: std sqrt(1/3) with ddof 1, 1/2 with ddof 0
    assert run(grpo, [[1, 0, 0, 1]], eps=0.0) == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])
    assert run(grpo, [[1, 0, 0, 1]], ddof=0, eps=0.1) == pytest.approx([5 / 6, -5 / 6, -5 / 6, 5 / 6])
    assert run(grpo, [[1, 0, 0, 1]], scale="none") == [0.5, -0.5, -0.5, 0.5]


def test_grpo_batch_std_by_hand() -> None:
    # the four rewards have mean 5/4 and squared deviations 1/16 + 25/16 + 49/16 + 1/16 = 19/4
    std = (19 / 4 / 3) ** 0.5
    expected = [0.5 / std, -0.5 / std, 1 / std, -1 / std]
    assert run(grpo, [[1, 0], [3, 1]], scale="batch_std", eps=0.0) == pytest.approx(expected)
    assert run(grpo, [[1, 1], [3, 1]], scale="batch_std")[:2] == [0.0, 0.0]


def test_rloo_by_hand() -> None:
    assert run(rloo, [[1, 2, 6]]) == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])
    assert run(rloo, [[1, 2, 6], [0, 1]]) == pytest.approx([-3, -1.5, 4.5, -1, 1])


@pytest.mark.parametrize("estimator", [grpo, rloo])
def test_total_and_outcome(estimator: Any) -> None:
    g = group("g", [2, 2])
    scores = [[score(1.0, [0.5, 0.5]), score(1.0, [0.0, 0.0])]]
    total = firsts(estimator([g], scores))
    assert total[0] > 0 > total[1]
    assert firsts(estimator([g], scores, of="outcome")) == [0.0, 0.0]


@pytest.mark.parametrize("estimator", [grpo, rloo, turn_return])
@pytest.mark.parametrize("rewards", [[[1.0]], [[0.1, 0.1, 0.1]], [[0.3, 0.1 + 0.2, 0.3 + 5e-9]], [[]], []])
def test_nothing_to_compare_is_exactly_zero(estimator: Any, rewards: list[list[float]]) -> None:
    assert run(estimator, rewards) == [0.0] * sum(map(len, rewards))


def test_failures_and_masked_trajectories() -> None:
    g = group("g", [1, 1, 1, 1])
    scores = [[score(1.0), score(None), score(0.0), score(5.0, in_gradient=False)]]
    # the baseline is {1, 0, 5}: mean 2
    assert firsts(grpo([g], scores, scale="none")) == [-1.0, 0.0, -2.0, 0.0]
    assert firsts(rloo([g], scores)) == [1 - 2.5, 0.0, 0 - 3.0, 0.0]
    assert firsts(turn_return([g], scores, scale="none")) == [-1.0, 0.0, -2.0, 0.0]


def test_a_trajectory_outside_the_baseline_is_compared_with_all_inside() -> None:
    g = group("g", [1, 1, 1])
    scores = [[score(1.0), score(3.0), score(7.0, in_baseline=False)]]
    assert firsts(rloo([g], scores)) == [-2.0, 2.0, 5.0]
    assert firsts(grpo([g], scores, scale="none")) == [-1.0, 1.0, 5.0]


# A: r = (1, 2), R = 4 -> G = (1 + 2/2 + 4/2, 2 + 4) = (4, 6)
# B: r = (0, 0, 1), R = 0 -> G = (1/4, 1/2, 1), all with gamma = 1/2
RETURNS = [[score(4.0, [1, 2]), score(0.0, [0, 0, 1])]]


def values(advantages: Advantages, trajectory: int) -> list[float]:
    for turn in advantages[trajectory]:
        assert len(turn) == 2
        assert turn[0] == turn[1]
    return [float(turn[0]) for turn in advantages[trajectory]]


def test_turn_return_at_equal_index_by_hand() -> None:
    g = group("g", [2, 3])
    advantages = turn_return([g], RETURNS, gamma=0.5, scale="none")
    assert values(advantages, A) == pytest.approx([1.875, 2.75])
    assert values(advantages, B) == pytest.approx([-1.875, -2.75, 0.0])
    advantages = turn_return([g], RETURNS, gamma=0.5, eps=0.0)  # two values: +-1/sqrt(2)
    assert values(advantages, A) == pytest.approx([0.70710678, 0.70710678])
    assert values(advantages, B) == pytest.approx([-0.70710678, -0.70710678, 0.0])


def test_turn_return_over_the_batch_and_mixed_by_hand() -> None:
    g = group("g", [2, 3])
    advantages = turn_return([g], RETURNS, gamma=0.5, among="batch", scale="none")  # mean 11.75/5
    assert values(advantages, A) == pytest.approx([4 - 2.35, 6 - 2.35])
    assert values(advantages, B) == pytest.approx([0.25 - 2.35, 0.5 - 2.35, 1 - 2.35])
    advantages = turn_return([g], RETURNS, gamma=0.5, among="mixed", mix=0.25, scale="none")
    assert values(advantages, A) == pytest.approx([0.25 * 1.875 + 0.75 * 1.65, 0.25 * 2.75 + 0.75 * 3.65])
    assert values(advantages, B)[2] == pytest.approx(0.75 * -1.35)


def test_turn_return_compares_within_groups_by_index() -> None:
    groups = [group("g", [1, 1]), group("h", [1, 1])]
    scores = [[score(0.0), score(1.0)], [score(10.0), score(12.0)]]
    assert firsts(turn_return(groups, scores, scale="none")) == [-0.5, 0.5, -1.0, 1.0]


@pytest.mark.parametrize("estimator", [grpo, rloo, turn_return])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_one_clear_error(estimator: Any, bad: float) -> None:
    with pytest.raises(TrainingError, match=r"task 't', attempt 1: .* cannot be trained on") as caught:
        estimator([group("g", [1, 1])], [[score(1.0), score(bad)]])
    assert "\n" not in str(caught.value)


def test_a_step_reward_that_is_not_finite_is_found_even_where_the_total_is() -> None:
    bad = Score(outcome={"agent": 1.0}, turn=np.array([np.nan], dtype=np.float32), total=1.0)
    with pytest.raises(TrainingError, match=r"step rewards \[nan\]"):
        turn_return([group("g", [1, 1])], [[score(1.0), bad]])


@pytest.mark.parametrize(
    ("estimator", "knobs", "message"),
    [
        (grpo, {"of": "totl"}, "of = 'totl' is not known; did you mean 'total'"),
        (grpo, {"scale": "groupstd"}, "did you mean 'group_std'"),
        (grpo, {"ddof": 2}, "ddof = 2"),
        (rloo, {"of": "outcomes"}, "did you mean 'outcome'"),
        (turn_return, {"among": "indx"}, "did you mean 'index'"),
        (turn_return, {"gamma": 1.5}, "gamma = 1.5 must be within"),
    ],
)
def test_bad_knobs(estimator: Any, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(estimator, [[0.0, 1.0]], **knobs)


def test_scores_must_line_up() -> None:
    with pytest.raises(ValueError, match="groups of"):
        grpo([group("g", [1, 1])], [[score(1.0)]])


def test_statistics_are_in_float64() -> None:
    # in float32 these three are one number
    assert run(grpo, [[1e8, 1e8 + 1, 1e8 + 2]], scale="none") == [-1.0, 0.0, 1.0]
