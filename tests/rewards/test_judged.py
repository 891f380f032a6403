"""Rewards of recorded verdicts, against numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from turnstile.credit.samples import sample_trajectory
from turnstile.errors import ConfigError
from turnstile.rewards.judged import checklist, judge, pairwise_judge, rubric
from turnstile.types import Stop, Task, Trajectory

TASK = Task(id="t", env="e")
SCORES = {"brief": 1.0, "right": 0.25, "rude": 0.5}


def recorded(**signals: Any) -> Trajectory:
    return sample_trajectory([1], signals=signals)


def test_scores_are_passed_on() -> None:
    assert judge(TASK, recorded(judge=0.7)) == 0.7
    assert judge(TASK, recorded(style=0.2, judge=0.7), signal="style") == 0.2
    assert pairwise_judge(TASK, recorded(pairwise_judge=0.75)) == 0.75


def test_a_rubric_is_a_weighted_mean() -> None:
    found = recorded(rubric=SCORES)
    assert rubric(TASK, found) == pytest.approx(1.75 / 3)
    assert rubric(TASK, found, weights={"right": 3.0}) == pytest.approx((1.0 + 0.75 + 0.5) / 5)
    assert rubric(TASK, found, weights={"rude": -1.0}) == pytest.approx((1.25 - 0.5) / 2)
    assert rubric(TASK, found, weights={"rude": -9.0}) == 0.0
    assert rubric(TASK, found, weights={"brief": 0.0, "rude": 0.0}) == 0.25
    own = replace(TASK, data={"points": {"right": 3.0}})
    assert rubric(own, found, weights={"rude": -1.0}, key="points") == pytest.approx((1.0 + 0.75 + 0.5) / 5)
    assert rubric(TASK, found, weights={"rude": -1.0}, key="points") == pytest.approx((1.25 - 0.5) / 2)
    with pytest.raises(ConfigError, match="wants weights to map names to numbers, got 'many' for task 't'"):
        rubric(replace(TASK, data={"points": "many"}), found, key="points")


def test_a_checklist_is_the_share_of_what_is_met() -> None:
    items = {"a": {"met": True, "evidence": "x"}, "b": {"met": False, "evidence": ""}}
    assert checklist(TASK, recorded(checklist=items)) == 0.5
    assert checklist(TASK, recorded(checklist=items), weights={"a": 3.0}) == 0.75


@pytest.mark.parametrize("reward", [judge, pairwise_judge, rubric, checklist])
def test_a_missing_verdict_is_none_and_not_zero(reward: Callable[..., float | None]) -> None:
    name = reward.__name__
    assert reward(TASK, recorded(**{name: None})) is None
    assert reward(TASK, replace(recorded(), stop=Stop.ERROR)) is None
    with pytest.raises(ConfigError, match=rf'add \[\[graders\]\] kind = "{name}" to the recipe'):
        reward(TASK, recorded())


@pytest.mark.parametrize(
    ("reward", "verdict", "knobs", "line"),
    [
        (judge, math.nan, {}, r"wants a number in \[0, 1\], but the episode recorded judge = nan"),
        (judge, 7, {}, "judge = 7"),
        (pairwise_judge, "A", {}, "pairwise_judge = 'A'"),
        (rubric, 0.5, {}, "to map names to verdicts, got 0.5"),
        (rubric, {}, {}, "to map names to verdicts"),
        (rubric, {"a": math.nan}, {}, "rubric.a = nan"),
        (
            rubric,
            SCORES,
            {"weights": {"brif": 1.0}},
            "weighs 'brif', of which there is no verdict; did you mean 'brief'",
        ),
        (rubric, {"a": 1.0}, {"weights": {"a": 0.0}}, "wants a weight above 0"),
        (checklist, {"a": True}, {}, "checklist.a = True"),
    ],
)
def test_bad_verdicts_are_one_clear_line(reward: Any, verdict: Any, knobs: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        reward(TASK, recorded(**{reward.__name__: verdict}), **knobs)
