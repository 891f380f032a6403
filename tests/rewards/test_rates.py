"""Rates of a step, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turnstile.credit.samples import sample_trajectory
from turnstile.rewards.base import Term, Threshold
from turnstile.rewards.build import Scorer, make_term
from turnstile.rewards.rates import completed, modified, rates, resolved
from turnstile.types import Group, Stop, Task

TASK = Task(id="t", env="swe")


def test_rates_of_five_episodes_of_which_infrastructure_broke_one() -> None:
    ends = [
        (Stop.SUBMITTED, {"submitted": True, "modified": True, "resolved": True}),
        (Stop.SUBMITTED, {"submitted": True, "modified": True, "resolved": False}),
        (Stop.SUBMITTED, {"submitted": True, "modified": False, "resolved": False}),
        (Stop.TURNS, {"submitted": False, "modified": True, "resolved": True}),
        (Stop.ERROR, {}),
    ]
    group = Group(
        id="g",
        task=TASK,
        trajectories=tuple(
            sample_trajectory([1, 1], attempt=i, stop=stop, signals=signals) for i, (stop, signals) in enumerate(ends)
        ),
    )
    outcome = make_term("outcome", "outcome_class", level=1, gate=Threshold(value=-0.2))
    step = Term(name="step", function=lambda task, trajectory: [1.0, 0.0], scope="turn", level=0, weight=0.1)
    result = rates([group], Scorer(terms=(outcome, step))([group]))
    assert result["rate/completion"] == 0.75
    assert result["rate/modification"] == 0.5
    assert result["rate/resolution"] == 0.25
    assert result["gate/outcome"] == 0.5
    assert result["reward/outcome"] == pytest.approx((1.0 + 0.0 - 0.2 - 0.5) / 4)
    assert result["reward/total"] == pytest.approx((1.1 + 0.1 - 0.2 - 0.5) / 4)
    assert result["reward/granted/step"] == pytest.approx(0.05)
    assert result["reward/withheld/step"] == pytest.approx(0.05)
    assert result["reward/step_granted"] == pytest.approx(0.05)
    assert result["reward/step_withheld"] == pytest.approx(0.05)
    assert result["reward/withheld_by/outcome"] == pytest.approx(0.05)
    assert result["count/trajectories"] == 5
    assert (result["count/errors"], result["count/judge_killed"]) == (1, 0)
    assert result["stop/error"] == pytest.approx(0.2)
    assert result["stop/submitted"] == pytest.approx(0.6)
    assert result["turns"] == 2


def test_attempts_whose_judge_was_killed_are_counted() -> None:
    errors = ["VerifierKilledError: exit code 137", "SandboxError: it died", None]
    trajectories = [
        replace(sample_trajectory([1], attempt=i, stop=Stop.ERROR if error else Stop.TURNS), error=error)
        for i, error in enumerate(errors)
    ]
    group = Group(id="g", task=TASK, trajectories=tuple(trajectories))
    result = rates([group], Scorer(terms=(make_term("outcome", lambda task, trajectory: 1.0),))([group]))
    assert (result["count/errors"], result["count/judge_killed"]) == (2, 1)


def test_rates_say_nothing_about_what_was_not_recorded() -> None:
    trajectory = sample_trajectory([1], signals={"outcome": 1.0})
    group = Group(id="g", task=TASK, trajectories=(trajectory,))
    result = rates([group], Scorer(terms=(make_term("outcome", "signal"),))([group]))
    assert "rate/completion" not in result
    assert result["reward/total"] == 1.0


@pytest.mark.parametrize(
    ("stop", "signals", "expected"),
    [
        (Stop.DONE, {"resolved": True}, (True, True, True)),
        (Stop.SUBMITTED, {}, (True, True, False)),
        (Stop.TURNS, {"resolved": True}, (False, False, False)),
        (Stop.DONE, {"submitted": False, "resolved": True}, (False, False, False)),
        (Stop.DONE, {"modified": False, "resolved": True}, (True, False, False)),
        (Stop.ERROR, {}, (False, False, False)),
    ],
)
def test_an_environment_need_not_record_everything(
    stop: Stop, signals: dict[str, bool], expected: tuple[bool, bool, bool]
) -> None:
    trajectory = sample_trajectory([1], stop=stop, signals=signals)
    assert (completed(trajectory), modified(trajectory), resolved(trajectory)) == expected


def test_rates_of_failures_only_and_of_nothing() -> None:
    group = Group(id="g", task=TASK, trajectories=(sample_trajectory([1], stop=Stop.ERROR),))
    result = rates([group], Scorer(terms=(make_term("outcome", "signal"),))([group]))
    assert (result["count/errors"], result["count/judge_killed"]) == (1, 0)
    assert "reward/total" not in result
    assert rates([], []) == {"count/trajectories": 0.0, "count/errors": 0.0, "count/judge_killed": 0.0}
