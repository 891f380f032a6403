"""The table of stops."""

from __future__ import annotations

import numpy as np
import pytest

from turnstile.credit.samples import sample_trajectory
from turnstile.errors import ConfigError
from turnstile.rewards.on_stop import StopRules
from turnstile.types import Score, Stop


def graded(outcome: float) -> Score:
    steps = np.array([0.4, -0.2], dtype=np.float32)
    nothing = np.zeros(2, dtype=np.float32)
    total = outcome + float(steps.sum(dtype=np.float64))
    return Score(outcome={"agent": outcome}, turn=steps, total=total, granted={"s": steps}, withheld={"s": nothing})


TURNS = sample_trajectory([1, 1], stop=Stop.TURNS)


def test_grade_and_unnamed_stops_keep_the_score() -> None:
    score = graded(1.0)
    assert StopRules().apply(score, TURNS) is score
    assert StopRules.read({"turns": "grade", "timeout": "zero"}).apply(score, TURNS) is score


def test_zero_withholds_every_reward() -> None:
    score = StopRules.read({"turns": "zero"}).apply(graded(-0.5), TURNS)
    assert score.outcome == {"agent": 0.0}
    assert score.total == 0.0
    assert score.turn.tolist() == [0.0, 0.0]
    assert score.withheld["s"] == pytest.approx([0.4, -0.2])
    assert score.withheld_by == {"s": ("on_stop.turns",)}
    assert score.in_gradient


@pytest.mark.parametrize(("outcome", "expected"), [(1.0, 0.5), (-0.5, -0.5)])
def test_half_never_makes_an_end_better(outcome: float, expected: float) -> None:
    score = StopRules.read({"turns": "half"}).apply(graded(outcome), TURNS)
    assert score.outcome == {"agent": expected}
    assert score.turn == pytest.approx([0.2, -0.2])
    assert score.total == pytest.approx(expected + 0.0)
    assert score.granted["s"] == pytest.approx([0.2, -0.2])
    assert score.withheld["s"] == pytest.approx([0.2, 0.0])


@pytest.mark.parametrize(("rule", "in_baseline"), [("mask", True), ("drop", False)])
def test_mask_and_drop(rule: str, in_baseline: bool) -> None:
    score = StopRules.read({"turns": rule}).apply(graded(1.0), TURNS)
    assert (score.in_baseline, score.in_gradient) == (in_baseline, False)
    assert score.total == graded(1.0).total


def test_an_infrastructure_failure_is_always_dropped() -> None:
    score = StopRules().apply(graded(1.0), sample_trajectory([1, 1], stop=Stop.ERROR))
    assert score.outcome is None
    assert (score.in_baseline, score.in_gradient) == (False, False)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"turn": "zero"}, "unknown end 'turn'; did you mean 'turns'"),
        ({"turns": "zer"}, "on_stop.turns: unknown rule 'zer'; did you mean 'zero'"),
        ({"error": "zero"}, "infrastructure failures are always dropped"),
    ],
)
def test_unknown_words_are_refused(table: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StopRules.read(table)
