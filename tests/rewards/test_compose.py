"""Composition with hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from turnstile.credit.samples import sample_trajectory
from turnstile.errors import ConfigError
from turnstile.rewards.base import Term, Threshold
from turnstile.rewards.compose import direct, gated
from turnstile.rewards.shaping import potential, self_correction
from turnstile.types import Stage, Stop, Task, Trajectory

TASK = Task(id="t", env="swe")
TRAJECTORY = sample_trajectory([1, 2, 1])


def episode(name: str, value: float | None, level: int, gate: Threshold | None = None, weight: float = 1.0) -> Term:
    return Term(name=name, function=lambda t, x: value, scope="episode", level=level, weight=weight, gate=gate)


def turns(name: str, values: list[float], level: int, gate: Threshold | None = None, weight: float = 1.0) -> Term:
    return Term(name=name, function=lambda t, x: values, scope="turn", level=level, weight=weight, gate=gate)


def test_gated_withholds_the_step_rewards_of_an_empty_patch() -> None:
    terms = [
        episode("outcome", -0.2, 1, gate=Threshold(value=-0.2)),
        turns("ok", [1, 0, 1], 0, weight=0.1),
    ]
    score = gated(terms, TASK, TRAJECTORY)
    assert score.outcome == {"agent": -0.2}
    assert score.turn.tolist() == [0, 0, 0]
    assert score.total == pytest.approx(-0.2)
    assert score.gates == {"outcome": False}
    assert score.withheld["ok"] == pytest.approx([0.1, 0, 0.1])
    assert not score.granted["ok"].any()


def test_direct_grants_the_same_rewards() -> None:
    terms = [
        episode("outcome", -0.2, 1, gate=Threshold(value=-0.2)),
        turns("ok", [1, 0, 1], 0, weight=0.1),
    ]
    score = direct(terms, TASK, TRAJECTORY)
    assert score.turn == pytest.approx([0.1, 0, 0.1])
    assert score.turn.dtype == np.float32
    assert score.total == pytest.approx(0.0, abs=1e-7)
    assert score.gates == {"outcome": True}
    assert not score.withheld["ok"].any()


def test_gate_opens_strictly_above_its_threshold_or_at_it() -> None:
    steps = turns("ok", [1, 1, 1], 0)
    for value in (0.1, -0.2, 0.3):  # numbers that float32 would round past their own threshold
        strict = gated([episode("o", value, 1, gate=Threshold(value=value)), steps], TASK, TRAJECTORY)
        assert strict.turn.sum() == 0
        at = gated([episode("o", value, 1, gate=Threshold(value=value, compare="ge")), steps], TASK, TRAJECTORY)
        assert at.turn.sum() == 3


def test_gate_compares_the_reward_before_weighting() -> None:
    terms = [episode("o", 1.0, 1, gate=Threshold(value=0.5), weight=0.1), turns("ok", [1, 0, 0], 0)]
    score = gated(terms, TASK, TRAJECTORY)
    assert score.gates == {"o": True}
    assert score.total == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("middle", "expected"),
    # top passes; the middle level (a sum over turns) gates the bottom, but not itself
    [([0.5, 0.6, 0.0], 1.0 + 1.1 + 2.0), ([0.5, 0.5, 0.0], 1.0 + 1.0)],
)
def test_three_levels(middle: list[float], expected: float) -> None:
    terms = [
        episode("top", 1.0, 2, gate=Threshold(value=0.0)),
        turns("middle", middle, 1, gate=Threshold(value=1.0)),
        turns("bottom", [1, 0, 1], 0),
    ]
    assert gated(terms, TASK, TRAJECTORY).total == pytest.approx(expected)


def test_a_closed_top_gate_closes_every_level_below() -> None:
    terms = [
        episode("top", 0.0, 2, gate=Threshold(value=0.0)),
        turns("middle", [5, 5, 5], 1, gate=Threshold(value=1.0)),
        turns("bottom", [1, 0, 1], 0),
    ]
    score = gated(terms, TASK, TRAJECTORY)
    assert score.total == 0.0
    assert score.gates == {"top": False, "middle": True}
    assert score.withheld["bottom"].tolist() == [1, 0, 1]


def test_every_gated_term_of_a_level_must_pass() -> None:
    terms = [
        episode("a", 1.0, 1, gate=Threshold(value=0.0)),
        episode("b", -1.0, 1, gate=Threshold(value=0.0)),
        episode("c", -9.0, 1),  # no gate: holds nothing back
        turns("ok", [1, 1, 1], 0),
    ]
    score = gated(terms, TASK, TRAJECTORY)
    assert score.turn.sum() == 0
    assert score.gates == {"a": True, "b": False}
    assert score.outcome == {"agent": -9.0}


def test_a_lower_episode_term_falls_on_the_last_turn() -> None:
    terms = [episode("outcome", 1.0, 1), episode("brevity", 0.5, 0), turns("ok", [1, 0, 0], 0, weight=0.1)]
    score = gated(terms, TASK, TRAJECTORY)
    assert score.outcome == {"agent": 1.0}
    assert score.turn == pytest.approx([0.1, 0, 0.5])
    assert score.total == pytest.approx(1.6)
    assert score.granted["brevity"] == pytest.approx([0, 0, 0.5])


def test_an_episode_without_turns_has_an_outcome_only() -> None:
    terms = [episode("outcome", -0.5, 1), episode("brevity", 0.5, 0), turns("ok", [], 0)]
    score = gated(terms, TASK, sample_trajectory([]))
    assert score.total == -0.5
    assert len(score.turn) == 0


@pytest.mark.parametrize("compose", [gated, direct])
def test_infrastructure_failures_have_no_reward(compose) -> None:  # type: ignore[no-untyped-def]
    broken = sample_trajectory([1, 1], stop=Stop.ERROR)
    for trajectory, value in ((broken, 1.0), (TRAJECTORY, None)):
        score = compose([episode("outcome", value, 1), episode("other", 1.0, 0)], TASK, trajectory)
        assert score.outcome is None
        assert score.total == 0.0
        assert not score.in_baseline
        assert not score.in_gradient
        assert len(score.turn) == len(trajectory.turns)
        assert np.isnan(score.outcome_of())


def test_a_turn_that_the_environment_did_not_answer_has_no_step_reward() -> None:
    """It recorded nothing, so terms of turns judge those before it, and terms of the episode all of it."""
    seen = [{"passing": 0.25, "tests_passed": False}, {"passing": 0.5, "tests_passed": True}, {}]
    played = sample_trajectory([2, 2, 2], stop=Stop.TIMEOUT, turn_signals=seen)
    played = replace(played, turns=(*played.turns[:2], replace(played.turns[2], stage=Stage.DELIVERED)))
    shaped = Term(
        name="shaped", function=lambda task, one: potential(task, one, signal="passing"), scope="turn", level=1
    )
    length = Term(name="length", function=lambda task, one: float(len(one.turns)), scope="episode", level=2)
    score = gated([shaped, length], TASK, played)
    two = gated([shaped, length], TASK, replace(played, turns=played.turns[:2]))
    assert score.outcome == {"agent": 3.0}
    assert score.turn.tolist() == [*two.turn.tolist(), 0.0]
    assert self_correction(TASK, played, signal="tests_passed") == 1.0
    first = replace(played, turns=played.turns[2:])
    assert gated([shaped, length], TASK, first).turn.tolist() == [0.0]


def _nan(task: Task, trajectory: Trajectory) -> float:
    return float("nan")


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (Term(name="bad", function=_nan, scope="episode", level=0), "gave nan; a reward must be finite"),
        (turns("bad", [1, 2], 0), "gave 2 numbers but scope 'turn' wants 3 numbers"),
        (Term(name="bad", function=lambda t, x: [1.0, 2.0], scope="episode", level=0), "wants one number"),
        (Term(name="bad", function=lambda t, x: 1.0, scope="turn", level=0), "wants 3 numbers, one for each turn"),
        (Term(name="bad", function=lambda t, x: "x", scope="episode", level=0), "gave str"),
    ],
)
def test_a_bad_reward_is_named(term: Term, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        gated([term], TASK, TRAJECTORY)
    assert "reward term 'bad', task 't', attempt 0" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_terms_need_different_names_and_there_must_be_one() -> None:
    with pytest.raises(ConfigError, match="'a' occurs twice"):
        gated([episode("a", 1, 1), episode("a", 1, 0)], TASK, TRAJECTORY)
    with pytest.raises(ConfigError, match="at least one term"):
        gated([], TASK, TRAJECTORY)
