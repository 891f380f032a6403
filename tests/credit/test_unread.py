"""Estimators that compare turns by a signal say so where no turn has it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from made_groups import attempt, by_turn, group_of, score
from turnstile.credit.base import unread
from turnstile.credit.grpo import grpo
from turnstile.credit.igpo import igpo
from turnstile.credit.per_agent import per_agent
from turnstile.credit.rlvmr import rlvmr
from turnstile.credit.subgoal import subgoal
from turnstile.types import Group, Trajectory

BARE = group_of(attempt(0, [1, 1]), attempt(1, [1]))
TAGGED = group_of(attempt(0, [1, 1], tags=["", "plan"]), attempt(1, [1], tags=[""]))


def test_one_line_says_what_is_missing_and_what_there_is() -> None:
    line = unread(rlvmr, [BARE, BARE])
    assert line is not None
    assert "credit 'rlvmr' compares turns by their signal 'tag', which none of 6 turns has" in line
    assert line.endswith("or name another in credit.tag (recorded: none)")
    other = unread(functools.partial(rlvmr, tag="thought"), [TAGGED])
    assert other is not None
    assert other.endswith("name another in credit.tag (recorded: tag)")
    assert "'subgoal', which none of 3 turns has" in (unread(subgoal, [TAGGED]) or "")
    assert "credit.key (recorded: tag)" in (unread(subgoal, [TAGGED]) or "")


@pytest.mark.parametrize(
    ("estimator", "groups"),
    [
        (rlvmr, [TAGGED]),
        (functools.partial(subgoal, key="tag", gamma=0.9), [BARE, TAGGED]),
        (grpo, [BARE]),
        (rlvmr, []),
        (rlvmr, [replace(BARE, trajectories=())]),
    ],
)
def test_nothing_is_said_where_all_is_well(estimator: Any, groups: Any) -> None:
    assert unread(estimator, groups) is None


@pytest.mark.parametrize("value", [0, "", None])
def test_a_signal_that_is_there_is_there_whatever_it_says(value: Any) -> None:
    assert unread(subgoal, [signalled(subgoal=value)]) is None


def signalled(**signals: Any) -> Group:
    """The group `BARE` with these signals on every turn."""

    def told(one: Trajectory) -> Trajectory:
        return replace(one, turns=tuple(replace(turn, signals=signals) for turn in one.turns))

    return replace(BARE, trajectories=tuple(map(told, BARE.trajectories)))


def test_zero_is_a_name_like_any_other() -> None:
    scores = [[score(1.0, [0, 1]), score(0.0, [0])]]
    for estimator, signal in ((subgoal, "subgoal"), (rlvmr, "tag")):
        zero, word, none = (by_turn(estimator([signalled(**{signal: value})], scores)) for value in (0, "find", ""))
        assert zero == word != none


def test_a_group_of_one_compares_its_turns_with_one_another() -> None:
    """As the docstrings of `igpo` and `per_agent` say: not 0, unlike what compares attempts."""
    alone = [group_of(attempt(0, [1, 1, 1]))]
    # rewards 0 0 3: less the mean 1 -1 2, to go 0 1 2
    assert by_turn(igpo(alone, [[score(3.0, [0, 0, 0])]], scale="none")) == [[0.0, 1.0, 2.0]]
    # returns 4 3 3: less the mean 10/3
    found = by_turn(per_agent(alone, [[score(3.0, [1, 0, 0])]], scale="none"))
    assert found[0] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert by_turn(per_agent(alone, [[score(3.0, [0, 0, 0])]])) == [[0.0, 0.0, 0.0]]
    assert by_turn(grpo(alone, [[score(3.0, [1, 0, 0])]])) == [[0.0, 0.0, 0.0]]
