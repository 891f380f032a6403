from __future__ import annotations

import io

import pytest

from turnstile.tracking import console
from turnstile.tracking.base import Tracker
from turnstile.tracking.console import ConsoleTracker, step_line
from turnstile.tracking.pace import duration


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, set by hand."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (185, "3:05 min"), (3600, "1:00 h"), (7620, "2:07 h")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_steps_line_holds_rates_rewards_gates_and_seconds() -> None:
    line = step_line(
        7,
        {
            "rate/completion": 1.0,
            "rate/resolution": 0.125,
            "reward/total": -0.06,
            "reward/outcome": 0.25,
            "gate/outcome": 0.5,
            "tokens/per_second": 104.4,
            "seconds/step": 22.0,
            "seconds/generate": 14.04,
            "unknown/metric": 3.0,
        },
    )
    assert line == (
        "step   7  compl 1.00  resol 0.12  reward -0.060  outcome +0.250  tok/s 104"
        "  gate outcome 0.50  22 s (generate 14.0)"
    )


def test_a_metric_that_is_no_number_is_left_out() -> None:
    assert step_line(1, {"reward/total": None, "rate/completion": "high"}) == "step   1"


def test_more_columns_by_name() -> None:
    out = io.StringIO()
    ConsoleTracker(columns=["train/kl"], file=out).log(1, {"train/kl": 0.012345})
    assert out.getvalue() == "step   1  train/kl 0.01235\n"


def test_messages_say_their_level_and_are_never_read_as_markup() -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(file=out)
    assert isinstance(tracker, Tracker)
    tracker.say("loaded [bold]x[/bold]")
    tracker.say("reward up, outcome down", level="alarm")
    assert out.getvalue() == "loaded [bold]x[/bold]\nalarm: reward up, outcome down\n"


def test_plain_progress_prints_now_and_then_with_time_left(clock: list[float]) -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(file=out, every=10)
    for second, done in ((0, 0), (4, 1), (12, 3), (14, 4), (24, 6), (40, 10)):
        clock[0] = 100.0 + second
        tracker.progress("warm start", done, 10)
    tracker.close()
    assert out.getvalue().splitlines() == [
        "warm start: 3/10, 28 s left",  # 3 in 12 s, so 4 s each, 7 to go
        "warm start: 6/10, 16 s left",
        "warm start: 10 done in 40 s",
    ]


def test_the_pace_of_a_resumed_phase_counts_from_where_it_began(clock: list[float]) -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(file=out, every=1)
    tracker.progress("training", 90, 100)
    clock[0] += 10
    tracker.progress("training", 95, 100)
    assert out.getvalue() == "training: 95/100, 10 s left\n"


def test_time_left_is_unknown_without_a_pace(clock: list[float]) -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(file=out, every=1)
    tracker.progress("evaluation", 0, 5)
    clock[0] += 3
    tracker.progress("evaluation", 0, 5)
    assert out.getvalue() == "evaluation: 0/5, time left unknown yet\n"


def test_short_phases_print_no_line(clock: list[float]) -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(file=out, every=10)
    for done in range(3):
        clock[0] += 1
        tracker.progress("episodes", done, 2)
    assert out.getvalue() == ""


def test_screen_is_on_while_a_phase_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    tracker = ConsoleTracker(file=out, plain=False)
    assert tracker._screen is not None
    tracker.progress("training", 0, 2)
    tracker.progress("episodes", 1, 8)
    assert tracker._screen.is_on
    tracker.progress("episodes", 8, 8)
    tracker.log(1, {"reward/total": 1.0})
    assert tracker._screen.is_on
    tracker.progress("training", 2, 2)
    assert not tracker._screen.is_on
    tracker.close()
    assert "reward +1.000" in out.getvalue()


def test_no_screen_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if colours are forced."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert ConsoleTracker(file=io.StringIO())._screen is None
