"""Branches, seats, and credit without a group's baseline, against numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from made_groups import attempt, by_turn, group_of, nested, score
from turnstile.credit.base import estimate
from turnstile.credit.branch import branch
from turnstile.credit.grpo import grpo
from turnstile.credit.lineage import common
from turnstile.credit.per_agent import per_agent
from turnstile.credit.reinforce import reinforce
from turnstile.credit.role_baseline import role_baseline
from turnstile.credit.threshold import threshold
from turnstile.credit.tree import tree
from turnstile.errors import TrainingError

# 0 is a root of three turns. 1 left it in turn 1 after one token, 2 left 1 before turn 2, 3 is a root of its own.
FAMILY = group_of(
    attempt(0, [2, 2, 1]),
    attempt(1, [2, 3, 1], parent=(0, 1, 1)),
    attempt(2, [2, 3, 2], parent=(1, 2, 0)),
    attempt(3, [1, 1]),
)
SCORES = [[score(1.0, [0, 0, 0]), score(0.0, [0, 0, 0]), score(1.0, [0, 0, 0]), score(0.0, [0, 0])]]


def test_common_follows_the_lineage() -> None:
    found = common(FAMILY)
    assert found[0][1] == found[1][0] == (1, 1)
    assert found[1][2] == (2, 0)
    assert found[0][2] == (1, 1)  # through 1
    assert found[0][3] == found[2][3] == (0, 0)
    assert found[2][2] == (3, 0)


def test_siblings_share_up_to_the_earlier_branching() -> None:
    g = group_of(attempt(0, [1] * 4), attempt(1, [1] * 4, parent=(0, 3, 0)), attempt(2, [1] * 4, parent=(0, 1, 0)))
    assert common(g)[1][2] == (1, 0)


def test_a_parent_that_is_missing_is_one_clear_error() -> None:
    with pytest.raises(TrainingError, match="attempt 1: it branched from attempt 7, which is not in its group"):
        common(group_of(attempt(0, [1]), attempt(1, [1], parent=(7, 0, 0))))
    circle = group_of(attempt(0, [1], parent=(1, 0, 0)), attempt(1, [1], parent=(0, 0, 0)))
    with pytest.raises(TrainingError, match="circle"):
        common(circle)


def test_branch_by_hand() -> None:
    # against the mean 1/2: +.5, -.5, +.5, -.5. Turn 0 is held by 0, 1, 2: mean 1/6; the first token of turn 1 too
    found = nested(branch([FAMILY], SCORES, scale="none"))
    assert found[0] == [pytest.approx([1 / 6] * 2), pytest.approx([1 / 6, 0.5]), [0.5]]
    assert found[1] == [pytest.approx([1 / 6] * 2), pytest.approx([1 / 6, 0.0, 0.0]), [-0.5]]  # 1 and 2: mean 0
    assert found[2] == [pytest.approx([1 / 6] * 2), pytest.approx([1 / 6, 0.0, 0.0]), [0.5, 0.5]]
    assert found[3] == [[-0.5], [-0.5]]


def test_branch_without_branches_is_grpo() -> None:
    g = group_of(attempt(0, [2, 1]), attempt(1, [1, 1, 2]))
    scores = [[score(1.0, [0, 0]), score(0.0, [0, 0, 0])]]
    assert nested(branch([g], scores)) == nested(grpo([g], scores))


def test_tree_by_hand() -> None:
    # V(root) = 1/2. After turn 0 of 0, 1, 2: 2/3 with 3 leaves. After turn 1: 0 alone: 1; 1 and 2: 1/2 with 2 leaves.
    found = by_turn(tree([FAMILY], SCORES, by_leaves=False))
    root, first = 1 / 2, 2 / 3
    assert found[0] == pytest.approx([2 * (first - root), (1 - first) + (1 - root), 0 + (1 - root)])
    assert found[1] == pytest.approx([2 * (first - root), (0.5 - first) + 0, (0 - 0.5) + (0 - root)])
    assert found[2] == pytest.approx([2 * (first - root), (0.5 - first) + 0, (1 - 0.5) + (1 - root)])
    assert found[3] == pytest.approx([2 * (0 - root), 0 - root])
    weighed = by_turn(tree([FAMILY], SCORES, overall=0.0))
    assert weighed[1] == pytest.approx([(first - root) / math.sqrt(3), (0.5 - first) / math.sqrt(2), -0.5])


def test_per_agent_keeps_seats_apart() -> None:
    # x speaks at turns 0 and 2, y at turn 1; gamma 1/2 counts x's own turns alone
    agents = ["x", "y", "x"]
    g = group_of(attempt(0, [1, 1, 1], agents=agents), attempt(1, [1, 1, 1], agents=agents))
    scores = [[score({"x": 1.0, "y": -1.0}, [0.5, 2.0, 0.0]), score({"x": -1.0, "y": 1.0}, [0.0, 0.0, 0.0])]]
    # returns of x: .5 + 1/2, 1 | -1/2, -1 -> mean 1/8; of y: 2 - 1 | 1: equal
    found = by_turn(per_agent([g], scores, gamma=0.5, scale="none"))
    assert found[0] == pytest.approx([1 - 1 / 8, 0.0, 1 - 1 / 8])
    assert found[1] == pytest.approx([-1 / 2 - 1 / 8, 0.0, -1 - 1 / 8])


def test_role_baseline_moves_and_is_kept() -> None:
    agents = ["x", "y"]
    g = group_of(attempt(0, [1, 1], agents=agents), attempt(1, [1, 1], agents=agents), env="duel")
    scores = [[score({"x": 1.0, "y": -1.0}, [0, 0]), score({"x": 0.0, "y": 0.0}, [0, 0])]]
    found, state = role_baseline([g], scores, {}, decay=0.5)
    assert state == {"duel/x": 0.375, "duel/y": -0.375}  # two games: 3/4 of the way to their mean
    assert by_turn(found) == [[1.0, -1.0], [0.0, 0.0]]
    found, later = role_baseline([g], scores, state, decay=0.5)
    assert later == {"duel/x": 0.46875, "duel/y": -0.46875}
    assert state == {"duel/x": 0.375, "duel/y": -0.375}  # what was given is not written to
    assert by_turn(found) == [[0.625, -0.625], [-0.375, 0.375]]


def test_a_seat_without_an_outcome_is_one_clear_error() -> None:
    g = group_of(attempt(0, [1], agents=["white"]), attempt(1, [1], agents=["white"]))
    for estimator in (role_baseline, per_agent):
        with pytest.raises(TrainingError, match=r"'white' spoke, but has no outcome \(there: agent\)"):
            estimate(estimator, [g], [[score(1.0), score(0.0)]], {}, {})


def test_tree_of_equal_outcomes_is_exactly_zero() -> None:
    g = group_of(*(attempt(i, [1, 1]) for i in range(3)))
    assert by_turn(tree([g], [[score(0.1, [0, 0])] * 3])) == [[0.0, 0.0]] * 3


def test_reinforce_by_hand() -> None:
    groups = [group_of(attempt(0, [1]), attempt(1, [1])), group_of(attempt(0, [1], group="h"), name="h")]
    scores = [[score(3.0), score(1.0)], [score(5.0)]]
    assert by_turn(reinforce(groups, scores)) == [[0.0], [-2.0], [2.0]]
    assert by_turn(reinforce(groups, scores, baseline="none")) == [[3.0], [1.0], [5.0]]


def test_threshold_by_hand() -> None:
    g = group_of(attempt(0, [1]), attempt(1, [1]), attempt(2, [1]))
    masked = replace(score(1.0), in_gradient=False)
    scores = [[score(0.5), score(0.4), masked]]
    found = by_turn(threshold([g], scores))
    assert found == [[1.0], [0.0], [0.0]]
    assert not np.signbit(found).any()  # no -0.0
    found = by_turn(threshold([g], scores, positive=0.25, negative=2.0))
    assert found == [[0.25], [-2.0], [0.0]]
