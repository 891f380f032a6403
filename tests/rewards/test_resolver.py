"""What was granted, what was withheld and by which gate, turn by turn."""

from __future__ import annotations

import numpy as np
import pytest

from turnstile.credit.samples import sample_trajectory
from turnstile.rewards.base import Term, Threshold
from turnstile.rewards.build import Scorer
from turnstile.rewards.compose import direct, gated
from turnstile.rewards.on_stop import StopRules
from turnstile.rewards.resolver import Resolved, resolve_turn, resolve_turns
from turnstile.types import Score, Stop, Task

TASK = Task(id="t", env="swe")
TRAJECTORY = sample_trajectory([1, 2])


def episode(name: str, value: float, level: int, over: float | None = None) -> Term:
    gate = None if over is None else Threshold(value=over)
    return Term(name=name, function=lambda t, x: value, scope="episode", level=level, gate=gate)


def turns(name: str, values: list[float], level: int, over: float | None = None) -> Term:
    gate = None if over is None else Threshold(value=over)
    return Term(name=name, function=lambda t, x: values, scope="turn", level=level, gate=gate)


# the outcome passes its gate, `asked` does not: `ran`, below both, is held back by `asked` alone
LEVELS = (episode("outcome", 1.0, 2, over=0.0), turns("asked", [0.0, 0.5], 1, over=1.0), turns("ran", [0.25, 0.0], 0))


def test_the_gate_that_is_closed_is_named() -> None:
    first, second = resolve_turns(gated(LEVELS, TASK, TRAJECTORY))
    assert first == (
        Resolved(term="asked", granted=0.0, withheld=0.0),
        Resolved(term="ran", granted=0.0, withheld=0.25, by=("asked",)),
    )
    assert second == (
        Resolved(term="asked", granted=0.5, withheld=0.0),
        Resolved(term="ran", granted=0.0, withheld=0.0),
    )


def test_all_closed_gates_above_are_named_from_the_recipes_order() -> None:
    shut = (episode("outcome", -1.0, 2, over=0.0), *LEVELS[1:])
    score = gated(shut, TASK, TRAJECTORY)
    assert score.withheld_by == {"asked": ("outcome",), "ran": ("outcome", "asked")}
    assert resolve_turn(score, 1)[0] == Resolved(term="asked", granted=0.0, withheld=0.5, by=("outcome",))


def test_with_the_gates_open_nothing_is_withheld() -> None:
    score = direct(LEVELS, TASK, TRAJECTORY)
    assert score.withheld_by == {}
    assert [one.granted for turn in resolve_turns(score) for one in turn] == [0.0, 0.25, 0.5, 0.0]


def test_what_is_granted_adds_up_to_the_composed_reward() -> None:
    for compose in (gated, direct):
        score = compose(LEVELS, TASK, TRAJECTORY)
        sums = [sum(one.granted for one in turn) for turn in resolve_turns(score)]
        assert sums == pytest.approx(score.turn.tolist())


def test_a_rule_on_stop_is_named_beside_the_gates() -> None:
    scorer = Scorer(terms=LEVELS, ends=StopRules.read({"turns": "half"}))
    score = scorer.score(TASK, sample_trajectory([1, 2], stop=Stop.TURNS))
    assert score.withheld_by == {"ran": ("asked",), "asked": ("on_stop.turns",)}
    assert resolve_turn(score, 1)[0] == Resolved(term="asked", granted=0.25, withheld=0.25, by=("on_stop.turns",))


def test_an_infrastructure_failure_has_nothing_to_resolve() -> None:
    lost = gated(LEVELS, TASK, sample_trajectory([1], stop=Stop.ERROR))
    assert resolve_turns(lost) == [()]


def test_an_older_record_is_read_without_the_names_of_gates() -> None:
    steps = np.array([0.5], np.float32)
    old = Score(outcome={"agent": 0.0}, turn=0 * steps, total=0.0, withheld={"ran": steps}, gates={"outcome": False})
    assert resolve_turns(old) == [(Resolved(term="ran", granted=0.0, withheld=0.5),)]
