"""Bad input to every kind of reward and grader: one clear error, or the documented nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from knobs import wrong_knobs
from rewarded import KNOBS, RECORDED, TASK
from turnstile.config import Kind
from turnstile.errors import ConfigError
from turnstile.lookup import KINDS
from turnstile.rewards.base import Term
from turnstile.rewards.build import Scorer, make_term
from turnstile.rewards.compose import gated
from turnstile.types import Group, Stop, Task, Trajectory
from turnstile.wiring.graders import GIVEN
from turnstile.wiring.kinds import bind

NAN = float("nan")
every = pytest.mark.parametrize("kind", sorted(KINDS["reward"]))


def term(kind: str, **knobs: Any) -> Term:
    return make_term("x", kind, {**KNOBS.get(kind, {}), **knobs})


def spoilt(value: Any) -> list[Trajectory]:
    """The sample, in turn with each of its signals, of the episode and of its second turn, in place of which stands
    `value`."""
    found = [replace(RECORDED, signals={**RECORDED.signals, name: value}) for name in RECORDED.signals]
    first, second, *rest = RECORDED.turns
    for name in second.signals:
        turn = replace(second, signals={**second.signals, name: value})
        found.append(replace(RECORDED, turns=(first, turn, *rest)))
    return found


def judged(kind: str, trajectory: Trajectory) -> None:
    """Gives a finite score, or one clear error."""
    try:
        score = gated([term(kind)], TASK, trajectory)
    except ConfigError as caught:
        error = str(caught)
    else:
        assert np.isfinite(score.turn).all()
        assert np.isfinite(score.total)
        return
    assert "\n" not in error
    assert f"'{kind}'" in error or "'x'" in error


@every
@pytest.mark.parametrize("value", [NAN, float("inf"), "many", None, [], {}, -1], ids=str)
def test_a_bad_signal_is_an_error_or_no_verdict_and_never_nan(kind: str, value: Any) -> None:
    for trajectory in spoilt(value):
        judged(kind, trajectory)


@every
def test_an_episode_without_turns_or_signals_is_judged(kind: str) -> None:
    judged(kind, replace(RECORDED, turns=()))
    judged(kind, replace(RECORDED, turns=(), signals={}))
    judged(kind, replace(RECORDED, signals={}))


@every
def test_infrastructure_failures_alone_have_no_reward(kind: str) -> None:
    lost = tuple(replace(RECORDED, attempt=i, stop=Stop.ERROR, error="it died") for i in range(3))
    for group in (Group(id="g", task=TASK, trajectories=lost), Group(id="g", task=TASK, trajectories=())):
        (scores,) = Scorer(terms=(term(kind),))([group])
        assert [(s.outcome, s.total, s.in_baseline, s.in_gradient) for s in scores] == [
            (None, 0.0, False, False)
        ] * len(group.trajectories)
    assert Scorer(terms=(term(kind),))([]) == []


@pytest.mark.parametrize(("kind", "knob", "value"), wrong_knobs("reward"))
def test_a_knob_of_the_wrong_type_is_one_clear_error(kind: str, knob: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"reward '{kind}': {knob} = ") as caught:
        term(kind, **{knob: value})
    assert "\n" not in str(caught.value)


@every
def test_unknown_words_name_the_nearest(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown reward kind '{kind}x'; did you mean '"):
        make_term("x", f"{kind}x")
    with pytest.raises(ConfigError, match=f"reward '{kind}' has no knob 'zzz'; "):
        term(kind, zzz=1)


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("compose", sorted(KINDS["compose"]))
def test_a_custom_reward_that_is_not_finite_is_refused(value: float, compose: str) -> None:
    def bad(task: Task, trajectory: Trajectory) -> float:
        return value

    scorer = Scorer(terms=(make_term("bad", bad),), compose=bind("compose", Kind(kind=compose)))
    with pytest.raises(ConfigError, match=r"reward term 'bad', task 't', attempt 0: .* a reward must be finite"):
        scorer.score(TASK, RECORDED)


@pytest.mark.parametrize(
    ("room", "kind", "knob", "value"),
    [
        (room, *found)
        for room in ("grader", "hint")
        for found in wrong_knobs(room, (*GIVEN, "seed", "steps", "criteria"))
    ],
)
def test_a_knob_of_the_wrong_type_of_a_grader_or_hint_is_one_clear_error(
    room: str, kind: str, knob: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"{room} kind '{kind}': {knob} = ") as caught:
        bind(room, Kind.model_validate({"kind": kind, knob: value}), given=GIVEN)
    assert "\n" not in str(caught.value)
