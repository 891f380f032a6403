"""An episode in which everything was recorded that a reward may read, and the knobs that a kind cannot be without."""

from __future__ import annotations

from typing import Any

from turnstile.credit.samples import sample_trajectory
from turnstile.types import Task

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
    "self_correction": {"signal": "tests_passed"},
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
