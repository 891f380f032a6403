"""Every kind of reward through the checker, under both compositions, and a bad one that it must catch."""

from __future__ import annotations

from typing import Any

import pytest

from turnstile.credit.samples import sample_trajectory
from turnstile.lookup import KINDS, resolve
from turnstile.rewards.base import Term, Threshold
from turnstile.rewards.build import make_term
from turnstile.rewards.check import check_rewards
from turnstile.rewards.compose import failed, gated
from turnstile.types import Score, Task, Trajectory

TASK = Task(id="t", env="swe", data={"answer": "act"})
TURN = {
    "parsed": True,
    "command": "fix",
    "succeeded": True,
    "looked_at_failing_code": True,
    "ran_tests": True,
    "modified": True,
    "x": 2,
    "tests_passed": True,
    "tag": "plan",
}
KNOBS: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "a.t"},
    "format": {"pattern": "[a-z]+"},
    "overlong": {"limit": 5, "buffer": 4},
    "long_trajectory": {"threshold": 1, "most": 4},
    "multiplicative": {"penalties": {"training_step": 0.5}},
    "tool_bonus": {"steps": 4},
    "tags": {"rewards": {"plan": 0.5}},
    "reward_machine": {"states": {"start": {"fix": ["start", 0.25]}}},
}
VERDICT = {
    "f2p_passed": 1, "f2p_total": 2, "p2p_passed": 3, "p2p_total": 3, "f2p_tests": {"a": True, "b": False},
}  # fmt: skip
EXAMINED = {
    "test_weights": {"a": 0.25, "b": 0.5},
    "training_step": 1,
    "answer_probabilities": [0.1, 0.2, 0.4, 0.4],
    "judge": 0.5,
    "pairwise_judge": 0.75,
    "rubric": {"short": 0.2, "right": 1.0},
    "checklist": {"tested": {"met": True, "evidence": "seen"}, "asked": {"met": False, "evidence": ""}},
}
RECORDED = sample_trajectory(
    [1, 2, 1],
    signals={"submitted": True, "modified": True, "resolved": True, "x": 2, "reference": [1, 3]} | VERDICT | EXAMINED,
    turn_signals=[TURN] * 3,
)


@pytest.mark.parametrize("compose", sorted(KINDS["compose"]))
@pytest.mark.parametrize("kind", sorted(KINDS["reward"]))
@pytest.mark.parametrize("level", [0, 2])
def test_invariants(kind: str, compose: str, level: int) -> None:
    terms = [
        make_term("x", kind, KNOBS.get(kind), level=level, gate=Threshold(value=0.5)),
        Term(name="other", function=lambda task, trajectory: -1.0, scope="episode", level=1),
    ]
    assert check_rewards(terms, TASK, RECORDED, resolve("compose", compose)) == {}


def _peeks(task: Task, trajectory: Trajectory) -> float:
    return float(sum(len(turn.context_ids) for turn in trajectory.turns) + trajectory.attempt)


def _forgets(terms: list[Term], task: Task, trajectory: Trajectory) -> Score:
    score = gated(terms, task, trajectory)
    if score.outcome is None:
        return Score(outcome={"agent": 0.0}, turn=failed(trajectory).turn, total=0.0)
    return Score(outcome=score.outcome, turn=score.turn[:-1], total=score.total)


def test_the_checker_catches_what_is_wrong() -> None:
    peeking = [Term(name="peeks", function=_peeks, scope="episode", level=0)]
    assert set(check_rewards(peeking, TASK, RECORDED)) == {1, 2}
    falls_on_the_last = [
        Term(name="o", function=lambda t, x: 1.0, scope="episode", level=1),
        Term(name="b", function=lambda t, x: 1.0, scope="episode", level=0),
    ]
    assert set(check_rewards(falls_on_the_last, TASK, RECORDED, _forgets)) == {4, 5, 6}
