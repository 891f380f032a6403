"""Alarms: hand-made series, state across a resume, and the rate of false alarms on simulated healthy runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from turnstile.errors import ConfigError, TrainingError
from turnstile.tracking.alarms import (
    Alarm,
    CollapseAlarm,
    EntropyAlarm,
    GapAlarm,
    GradientAlarm,
    KilledAlarm,
    RatioAlarm,
    ZeroAdvantageAlarm,
    slope,
    standard_alarms,
)

F64 = NDArray[np.float64]


def collapsing(step: int) -> dict[str, float]:
    """Outcome falls, one step term rises, another does not."""
    wiggle = 0.01 * (-1) ** step
    return {
        "reward/total": 0.1 + 0.02 * step + wiggle,
        "reward/outcome": 0.5 - 0.01 * step + wiggle,
        "reward/granted/ok": 0.03 * step,
        "reward/granted/format": 0.4,
    }


def test_slope_by_hand() -> None:
    # y = 1, 2, 2, 3: slope 3/5, residuals -.1, .3, -.3, .1 -> error sqrt(.2 / 2 / 5)
    estimate, error = slope([1, 2, 2, 3])
    assert estimate == pytest.approx(0.6)
    assert error == pytest.approx(math.sqrt(0.02))


def test_collapse_reports_once_and_names_the_driving_term() -> None:
    alarm = CollapseAlarm(window=8)
    said = [alarm.update(step, collapsing(step)) for step in range(12)]
    assert [line is not None for line in said] == [False] * 7 + [True] + [False] * 4
    line = said[7]
    assert line is not None
    assert "steps 0-7" in line
    assert "the step reward 'ok' drives it (+0.03 a step)" in line
    assert "\n" not in line


def test_collapse_reports_again_after_it_ended() -> None:
    alarm = CollapseAlarm(window=8)
    series = [collapsing(step) for step in range(10)]
    series += [{"reward/total": 1.0, "reward/outcome": 1.0 + 0.1 * step} for step in range(8)]
    series += [collapsing(step) for step in range(12)]
    assert sum(alarm.update(step, metrics) is not None for step, metrics in enumerate(series)) == 2


@pytest.mark.parametrize(
    "metrics",
    [
        lambda t: {"reward/total": 0.1 * t, "reward/outcome": 0.1 * t},
        lambda t: {"reward/total": -0.1 * t, "reward/outcome": -0.1 * t},
        lambda t: {"reward/total": 0.1 * t, "reward/outcome": 0.3},
        lambda t: {"reward/total": 0.1 * t, "reward/outcome": -0.01 * t if t % 2 else 0.0},  # noise, no trend
        lambda t: {"reward/total": 0.1 * t},
        lambda t: {"reward/total": 0.1 * t, "reward/outcome": float("nan")},
        lambda t: {"loss": 1.0},
    ],
)
def test_collapse_keeps_quiet(metrics: Callable[[int], dict[str, float]]) -> None:
    alarm = CollapseAlarm(window=8)
    assert [alarm.update(step, metrics(step)) for step in range(20)] == [None] * 20


def test_entropy() -> None:
    alarm = EntropyAlarm(fraction=0.5, window=2)
    series = [2.0, 2.0, 1.0, 1.5, 0.9, 0.8, 0.7, 2.0, 2.0, 0.1]
    said = [alarm.update(step, {"policy/entropy": value}) for step, value in enumerate(series)]
    # means of two: 1.25, 1.2, .85 (below 1), .75, 1.35, 2, 1.05
    assert [step for step, line in enumerate(said) if line] == [5]
    assert "of the first 2 steps' 2" in str(said[5])
    assert alarm.update(10, {"policy/entropy": 0.1}) is not None
    assert alarm.update(11, {}) is None


def test_zero_advantage() -> None:
    alarm = ZeroAdvantageAlarm(limit=3)
    series = [(4, 4), (4, 4), (3, 4), (4, 4), (4, 4), (4, 4), (4, 4), (0, 4)]
    said = [
        alarm.update(step, {"groups/zero_advantage": flat, "groups/total": all_})
        for step, (flat, all_) in enumerate(series)
    ]
    assert [step for step, line in enumerate(said) if line] == [5]  # once, until it has ended
    assert "no group has had a gradient for 3 steps, last at step 5" in str(said[5])
    alarm.update(8, {"groups/zero_advantage": 4, "groups/total": 4})
    other = ZeroAdvantageAlarm(limit=3)
    other.restore(json.loads(json.dumps(alarm.state())))
    assert [bool(other.update(step, {"groups/zero_advantage": 2, "groups/total": 2})) for step in (9, 10)] == [
        False,
        True,
    ]
    assert other.update(11, {}) is None
    with pytest.raises(ConfigError):
        ZeroAdvantageAlarm(limit=0)


def test_killed() -> None:
    alarm = KilledAlarm(share=0.1, window=3)
    series = [0, 1, 1, 2, 3, 0, 0, 0]
    said = [alarm.update(step, {"count/judge_killed": n, "count/trajectories": 10}) for step, n in enumerate(series)]
    # of thirty: 2, 4 (above 3), 6, 5, 3, 0
    assert [step for step, line in enumerate(said) if line] == [3]
    assert "the grader of 4 of 30 attempts of the last 3 steps got SIGKILL" in str(said[3])
    other = KilledAlarm(share=0.1, window=3)
    other.restore(json.loads(json.dumps(alarm.state())))
    assert other.update(8, {"count/judge_killed": 4, "count/trajectories": 10}) is not None
    assert alarm.update(8, {}) is None
    with pytest.raises(ConfigError):
        KilledAlarm(share=1.5)


@pytest.mark.parametrize(
    ("metrics", "speaks"),
    [
        ({"loss/ratio": 1.02, "loss/kl_behaviour": 0.01}, False),
        ({"loss/ratio": 2.5}, True),
        ({"loss/ratio": 0.4}, True),
        ({"loss/ratio": float("nan")}, True),
        ({"loss/ratio": 1.0, "loss/kl_behaviour": 0.9}, True),
        ({}, False),
    ],
)
def test_ratio(metrics: dict[str, float], speaks: bool) -> None:
    alarm = RatioAlarm()
    line = alarm.update(3, metrics)
    assert (line is not None) == speaks
    assert alarm.update(4, metrics) is None


def test_gradients_that_are_not_finite_are_counted_and_stop_the_run() -> None:
    alarm = GradientAlarm(limit=3)
    nan, inf = float("nan"), float("inf")
    series = [1.0, nan, 1.0, inf, nan]
    said = [alarm.update(step, {"optim/grad_norm": norm}) for step, norm in enumerate(series)]
    assert [line is not None for line in said] == [False, True, False, True, True]
    assert "2 in a row, 3 in all" in str(said[4])
    with pytest.raises(TrainingError, match="3 steps in a row, last at step 5"):
        alarm.update(5, {"optim/grad_norm": nan})


def test_gap_is_reported_once_and_not_for_older_weights() -> None:
    alarm = GapAlarm()
    said = [
        alarm.update(step, {"policy/logprob_gap": gap, "staleness/max": behind})
        for step, (gap, behind) in enumerate(
            [(0.02, 0.0), (0.4, 1.0), (0.4, 0.0), (0.5, 0.0), (0.01, 0.0), (math.nan, 0)]
        )
    ]
    assert [line is not None for line in said] == [False, False, True, False, False, True]
    assert said[2] is not None
    assert "at step 2 sampler and trainer are 0.4 nats a token apart on the same weights" in said[2]
    assert alarm.update(9, {}) is None


def test_alarms_resume_from_their_state() -> None:
    def feed(alarms: dict[str, Alarm], begin: int, end: int) -> list[tuple[str, int, str]]:
        said = []
        for step in range(begin, end):
            metrics = {
                **collapsing(step),
                "policy/entropy": 2.0 if step < 6 else 0.1,
                "loss/ratio": 3.0 if step > 4 else 1.0,
                "optim/grad_norm": float("nan") if step in (2, 9, 12) else 1.0,
            }
            said += [(name, step, line) for name, alarm in alarms.items() if (line := alarm.update(step, metrics))]
        return said

    whole = feed(standard_alarms(), 0, 30)
    assert {name for name, _, _ in whole} == {"collapse", "entropy", "ratio", "gradient"}
    for cut in range(0, 30, 7):
        first, second = standard_alarms(), standard_alarms()
        before = feed(first, 0, cut)
        for name, alarm in second.items():
            alarm.restore(json.loads(json.dumps(first[name].state())))
        assert before + feed(second, cut, 30) == whole


@pytest.mark.parametrize(
    "make",
    [
        lambda: CollapseAlarm(window=2),
        lambda: EntropyAlarm(fraction=2.0),
        lambda: RatioAlarm(limit=0.5),
        lambda: GapAlarm(limit=0.0),
        lambda: GradientAlarm(limit=0),
    ],
)
def test_refuses_bad_knobs(make: Callable[[], Alarm]) -> None:
    with pytest.raises(ConfigError, match="alarm"):
        make()


# The simulation that the collapse alarm's window and z are tuned on.


def noise(rng: np.random.Generator, runs: int, steps: int, sd: float, correlation: float) -> F64:
    """Autoregressive noise of a step's mean, f64[runs, steps]."""
    fresh = rng.normal(size=(runs, steps)) * sd
    result = fresh.copy()
    for t in range(1, steps):
        result[:, t] = correlation * result[:, t - 1] + np.sqrt(1 - correlation**2) * fresh[:, t]
    return result


def simulate(kind: str, correlation: float, runs: int, steps: int) -> tuple[F64, F64]:
    """The outcome and the total reward of runs, f64[runs, steps]."""
    rng = np.random.default_rng(7)
    outcome, extra = noise(rng, runs, steps, 0.07, correlation), noise(rng, runs, steps, 0.05, correlation)
    t = np.arange(steps)
    if kind == "learning":
        outcome += 0.6 * (1 - np.exp(-t / 60))
        extra += 0.2 * (1 - np.exp(-t / 60))
    elif kind == "step rewards level off":
        extra += 0.6 * (1 - np.exp(-t / 40))
    elif kind == "slow collapse":
        outcome -= 0.005 * t
        extra += 0.02 * t
    elif kind == "collapse":
        outcome -= 0.01 * t
        extra += 0.02 * t
    return outcome, outcome + extra


def alarmed(outcome: F64, total: F64, window: int, z: float) -> NDArray[np.bool_]:
    """Return in which runs the rule holds at some step: `slope` over all windows at once."""

    def in_errors(series: F64) -> F64:
        views = sliding_window_view(series, window, axis=1)
        x = np.arange(window) - (window - 1) / 2
        estimate = views @ x / (x @ x)
        residual = views - views.mean(-1, keepdims=True) - estimate[..., None] * x
        error = np.sqrt((residual**2).sum(-1) / (window - 2) / (x @ x))
        return np.asarray(estimate / error)

    holds: NDArray[np.bool_] = ((in_errors(total) > z) & (in_errors(outcome) < -z)).any(axis=1)
    return holds


@pytest.mark.parametrize("correlation", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["flat", "learning", "step rewards level off"])
def test_false_alarms_on_healthy_runs(kind: str, correlation: float) -> None:
    alarm = CollapseAlarm()
    rate = alarmed(*simulate(kind, correlation, 2000, 200), alarm.window, alarm.z).mean()
    # stated: at most 1.0 % in the worst kind, 0.1 % in the others; plus three standard errors of 2,000 runs
    stated = 0.010 if kind == "step rewards level off" else 0.001
    assert rate <= stated + 3 * np.sqrt(stated / 2000)


@pytest.mark.parametrize(("kind", "least"), [("slow collapse", 0.80), ("collapse", 0.97)])
def test_collapses_are_found_within_60_steps(kind: str, least: float) -> None:
    alarm = CollapseAlarm()
    assert alarmed(*simulate(kind, 0.0, 1000, 60), alarm.window, alarm.z).mean() >= least


def test_the_simulation_judges_as_the_alarm_does() -> None:
    outcomes, totals = simulate("slow collapse", 0.3, 40, 40)
    expected = alarmed(outcomes, totals, 20, 3.0)
    assert 0 < expected.sum() < 40
    for outcome, total, holds in zip(outcomes, totals, expected, strict=True):
        alarm = CollapseAlarm(window=20, z=3.0)
        said = [
            alarm.update(step, {"reward/outcome": float(o), "reward/total": float(r)})
            for step, (o, r) in enumerate(zip(outcome, total, strict=True))
        ]
        assert any(said) == holds
