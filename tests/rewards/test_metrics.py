"""Metrics of a step, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turnstile.credit.samples import sample_trajectory
from turnstile.rewards.base import Term, Threshold
from turnstile.rewards.build import Scorer, make_term
from turnstile.rewards.metrics import step_metrics
from turnstile.swe.rates import RATES
from turnstile.types import Group, Stop, Task, Trajectory

TASK = Task(id="t", env="swe")


def with_rates(trajectory: Trajectory) -> Trajectory:
    """The trajectory as `play` leaves it; an error has no rates."""
    if trajectory.stop is Stop.ERROR:
        return trajectory
    return replace(trajectory, rates={name: holds(trajectory) for name, holds in RATES.items()})


def test_rates_leave_out_an_episode_that_infrastructure_broke() -> None:
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
            with_rates(sample_trajectory([1, 1], attempt=i, stop=stop, signals=signals))
            for i, (stop, signals) in enumerate(ends)
        ),
    )
    outcome = make_term("outcome", "outcome_class", level=1, gate=Threshold(value=-0.2))
    step = Term(name="step", function=lambda task, trajectory: [1.0, 0.0], scope="turn", level=0, weight=0.1)
    result = step_metrics([group], Scorer(terms=(outcome, step))([group]))
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
    result = step_metrics([group], Scorer(terms=(make_term("outcome", lambda task, trajectory: 1.0),))([group]))
    assert (result["count/errors"], result["count/judge_killed"]) == (2, 1)


def test_rates_that_the_environment_does_not_name_are_left_out() -> None:
    trajectory = sample_trajectory([1], signals={"outcome": 1.0})
    group = Group(id="g", task=TASK, trajectories=(trajectory,))
    result = step_metrics([group], Scorer(terms=(make_term("outcome", "signal"),))([group]))
    assert "rate/completion" not in result
    assert result["reward/total"] == 1.0


def test_metrics_of_failures_only_and_of_no_episodes() -> None:
    group = Group(id="g", task=TASK, trajectories=(sample_trajectory([1], stop=Stop.ERROR),))
    result = step_metrics([group], Scorer(terms=(make_term("outcome", "signal"),))([group]))
    assert (result["count/errors"], result["count/judge_killed"]) == (1, 0)
    assert "reward/total" not in result
    assert step_metrics([], []) == {"count/trajectories": 0.0, "count/errors": 0.0, "count/judge_killed": 0.0}
