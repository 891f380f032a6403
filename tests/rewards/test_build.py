"""From a recipe's words to terms: built-in kinds, one's own functions, and errors that name the nearest word."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from turnstile.config import make_recipe
from turnstile.credit.samples import sample_trajectory
from turnstile.errors import ConfigError
from turnstile.lookup import KINDS
from turnstile.rewards.base import Threshold
from turnstile.rewards.build import Scorer, make_term
from turnstile.rewards.compose import direct
from turnstile.rewards.on_stop import StopRules
from turnstile.types import F32, Group, Stop, Task, Trajectory
from turnstile.wiring.world import make_scorer

TASK = Task(id="t", env="swe")


def brevity(task, trajectory, *, limit: int = 8):  # type: ignore[no-untyped-def]
    return 1.0 - len(trajectory.turns) / limit


def each_turn(task: Task, trajectory: Trajectory) -> Sequence[float]:
    return [0.5 for _ in trajectory.turns]


def as_array(task: Task, trajectory: Trajectory) -> F32:
    return np.ones(len(trajectory.turns), dtype=np.float32)


def maybe(task: Task, trajectory: Trajectory) -> float | None:
    return None


SCOPES = {
    "outcome_class": "episode",
    "signal": "episode",
    "turn_signal": "turn",
    "env": "turn",
    "valid_format": "turn",
    "command_succeeded": "turn",
    "looked_at_failing_code": "turn",
    "ran_tests": "turn",
    "modified_code": "turn",
    "tests_passed": "episode",
    "exact": "episode",
    "regex": "episode",
    "format": "turn",
    "overlong": "episode",
    "long_trajectory": "episode",
    "efficiency": "episode",
    "potential": "turn",
    "bounded": "turn",
    "centred": "episode",
    "self_correction": "episode",
    "tags": "turn",
    "novelty": "turn",
    "reward_machine": "turn",
    "weighted_tests": "episode",
    "multiplicative": "episode",
    "tool_bonus": "episode",
    "information_gain": "turn",
    "judge": "episode",
    "pairwise_judge": "episode",
    "rubric": "episode",
    "checklist": "episode",
}
REQUIRED: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "x"},
    "format": {"pattern": "x"},
    "overlong": {"limit": 2, "buffer": 1},
    "long_trajectory": {"threshold": 1, "most": 2},
    "tags": {"rewards": {}},
    "reward_machine": {"states": {}},
    "tool_bonus": {"steps": 1},
    "self_correction": {"signal": "right"},
}
"""The knobs that have no default."""


def test_built_in_kinds_say_their_scope() -> None:
    assert {kind: make_term("x", kind, REQUIRED.get(kind)).scope for kind in KINDS["reward"]} == SCOPES


def test_the_scope_of_a_custom_function_is_found() -> None:
    assert [make_term("x", f).scope for f in (brevity, each_turn, as_array, maybe)] == [
        "episode",
        "turn",
        "turn",
        "episode",
    ]
    assert make_term("x", brevity, scope="turn").scope == "turn"


def test_a_custom_reward_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_rewards")
    module.brevity = brevity  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    term = make_term("", "my_rewards:brevity", {"limit": 4}, weight=2.0, gate=Threshold(value=0.0))
    assert term.name == "my_rewards:brevity"
    scored = Scorer(terms=(term,)).score(TASK, sample_trajectory([1, 1, 1]))
    assert scored.outcome == {"agent": pytest.approx(0.5)}
    assert scored.gates == {"my_rewards:brevity": True}


def test_signal_takes_the_terms_name() -> None:
    trajectory = sample_trajectory([1], signals={"solved": True})
    assert Scorer(terms=(make_term("solved", "signal"),)).score(TASK, trajectory).total == 1.0


@pytest.mark.parametrize(
    ("kind", "knobs", "message"),
    [
        ("outcome_clas", {}, "did you mean 'outcome_class'"),
        ("outcome_class", {"pased": 1.0}, "no knob 'pased'; did you mean 'passed'"),
        ("outcome_class", {"wieght": 1.0}, "no knob 'wieght'; did you mean 'weight'"),
        (each_turn, {"lvel": 1}, "no knob 'lvel'; did you mean 'level'"),
        (each_turn, {"x": 1}, "no knob 'x'; known: gate, kind, level, name, scope, weight"),
        (lambda task: 1.0, {}, "a reward is \\(task, trajectory"),
    ],
)
def test_unknown_kinds_and_knobs_are_named(kind, knobs, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make_term("x", kind, knobs)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"kind": "ran_tests", "wieght": 0.1}, r"rewards.terms\[1\]: .* no knob 'wieght'; did you mean 'weight'\?"),
        ({"kind": "ran_tests", "onec": True}, r"rewards.terms\[1\]: .* no knob 'onec'; did you mean 'once'\?"),
        ({"kind": "run_tests"}, r"rewards.terms\[1\]: .* did you mean 'ran_tests'\?"),
    ],
)
def test_a_bad_term_is_named_by_its_place_in_the_recipe(term: dict[str, object], message: str) -> None:
    recipe = make_recipe({"rewards": {"terms": [{"kind": "signal", "name": "won"}, term]}})
    with pytest.raises(ConfigError, match=message):
        make_scorer(recipe)


def test_a_kind_that_is_not_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a function"):
        make_term("x", "turnstile.lookup:KINDS")


def test_a_scorer_scores_groups_and_applies_the_rules_on_stop() -> None:
    trajectories = (
        sample_trajectory([1, 1], attempt=0, signals={"solved": 1}),
        sample_trajectory([1, 1], attempt=1, signals={"solved": 1}, stop=Stop.TURNS),
        sample_trajectory([1, 1], attempt=2, stop=Stop.ERROR),
    )
    group = Group(id="g", task=TASK, trajectories=trajectories)
    scorer = Scorer(
        terms=(make_term("solved", "signal", level=1), make_term("each", each_turn)),
        compose=direct,
        ends=StopRules.read({"turns": "half"}),
    )
    [scores] = scorer([group])
    assert [score.total for score in scores] == pytest.approx([2.0, 1.0, 0.0])
    assert [score.in_gradient for score in scores] == [True, True, False]


@pytest.mark.parametrize(
    ("kind", "knobs", "message"),
    [
        ("overlong", {"limit": "many", "buffer": 1}, "reward 'overlong': limit = 'many' is not a whole number"),
        ("novelty", {"form": "frist"}, "form = 'frist' is not known; did you mean 'first'"),
        ("regex", {}, "missing a required argument: 'pattern'"),
    ],
)
def test_a_knob_of_the_wrong_type_is_found_at_once(kind: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_term("x", kind, knobs)
    assert message in str(caught.value)
