"""Outcome classes, signals and stepwise rewards from recorded signals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from turnstile.credit.samples import sample_trajectory
from turnstile.errors import ConfigError
from turnstile.rewards.signal import env_reward, of_turns, signal
from turnstile.rewards.steps import command_succeeded, valid_format
from turnstile.swe.rewards import looked_at_failing_code, modified_code, outcome_class, ran_tests
from turnstile.types import Stop, Task, Trajectory

TASK = Task(id="t", env="swe")


def ended(stop: Stop = Stop.SUBMITTED, **signals: Any) -> Trajectory:
    return sample_trajectory([1, 1], stop=stop, signals=signals)


@pytest.mark.parametrize(
    ("submitted", "modified", "resolved", "expected"),
    [
        (False, True, True, -0.5),
        (False, False, False, -0.5),
        (True, False, False, -0.2),
        (True, True, False, 0.0),
        (True, True, True, 1.0),
        (True, True, None, None),
    ],
)
def test_outcome_classes(submitted: bool, modified: bool, resolved: bool | None, expected: float | None) -> None:
    trajectory = ended(submitted=submitted, modified=modified, resolved=resolved)
    assert outcome_class(TASK, trajectory) == expected


def test_outcome_values_are_knobs_in_order() -> None:
    trajectory = ended(submitted=True, modified=True, resolved=True)
    assert outcome_class(TASK, trajectory, no_submit=-1, empty_patch=-1, fail=-1, passed=2) == 2
    with pytest.raises(ConfigError, match="no_submit <= empty_patch"):
        outcome_class(TASK, trajectory, no_submit=0.5)


def test_infrastructure_is_never_an_outcome_class() -> None:
    assert outcome_class(TASK, ended(stop=Stop.ERROR)) is None
    assert signal(TASK, ended(stop=Stop.ERROR)) is None


def test_a_missing_signal_is_named_with_the_recorded_ones() -> None:
    with pytest.raises(ConfigError, match=r"needs the signal 'submitted'.*recorded: guesses\); either let measure\(\)"):
        outcome_class(TASK, ended(guesses=3))
    with pytest.raises(ConfigError, match=r"needs the signal 'solved'.*recorded: nothing"):
        signal(TASK, ended(), name="solved")
    with pytest.raises(ConfigError, match=r"recorded: resolved, won\); did you mean 'resolved'\?"):
        signal(TASK, ended(resolved=True, won=False), name="solved")
    with pytest.raises(ConfigError, match=r"reward 'valid_format' needs the signal 'parsed', which a turn .* step\(\)"):
        valid_format(TASK, ended())


def test_signal_reads_the_signal_given_or_the_one_named_like_the_term() -> None:
    trajectory = ended(solved=True, f2p_passed=3, note="x", verdict=None)
    assert signal(TASK, trajectory, name="solved") == 1.0
    assert signal(TASK, trajectory, name="share", signal="f2p_passed", scale=0.5, offset=-1) == 0.5
    assert signal(TASK, trajectory, name="verdict") is None
    with pytest.raises(ConfigError, match="wants a number"):
        signal(TASK, trajectory, name="note")


def test_turn_signal_reads_a_number_of_each_turn() -> None:
    trajectory = sample_trajectory([1, 1])
    recorded = [{"consistent": True, "left": 3, "note": "x"}, {"consistent": False, "left": 1, "note": "y"}]
    turns = (replace(turn, signals=found) for turn, found in zip(trajectory.turns, recorded, strict=True))
    trajectory = replace(trajectory, turns=tuple(turns))
    assert of_turns(TASK, trajectory, name="consistent").tolist() == [1.0, 0.0]
    assert of_turns(TASK, trajectory, name="x", signal="left", scale=0.5, offset=-1.0).tolist() == [0.5, -0.5]
    with pytest.raises(ConfigError, match="wants a number, but a turn recorded note = 'x'"):
        of_turns(TASK, trajectory, name="note")
    with pytest.raises(ConfigError, match=r"'turn_signal' needs the signal 'lef', which a turn"):
        of_turns(TASK, trajectory, name="lef")


def test_env_reward_takes_one_term_or_all() -> None:
    trajectory = sample_trajectory([1, 1, 1])
    given = [{"food": 0.25, "step": -0.5}, {}, {"food": 1.0}]
    paid = replace(
        trajectory,
        turns=tuple(replace(turn, rewards=rewards) for turn, rewards in zip(trajectory.turns, given, strict=True)),
    )
    assert env_reward(TASK, paid).tolist() == [-0.25, 0.0, 1.0]
    assert env_reward(TASK, paid, term="food").tolist() == [0.25, 0.0, 1.0]


def worked() -> Trajectory:
    """view the failing code, an unreadable turn, run, view again, fix, undo, run, submit."""
    columns = ("parsed", "command", "succeeded", "looked_at_failing_code", "ran_tests", "modified")
    rows = [
        (True, "view", True, True, False, False),
        (False, "", False, False, False, False),
        (True, "run", True, False, True, False),
        (True, "view", True, True, False, False),
        (True, "fix", True, False, False, True),
        (True, "fix", False, False, False, False),
        (True, "undo", True, False, False, True),
        (True, "run", True, False, True, False),
        (True, "submit", True, False, False, False),
    ]
    return sample_trajectory([1] * len(rows), turn_signals=[dict(zip(columns, row, strict=True)) for row in rows])


def test_stepwise_rewards() -> None:
    trajectory = worked()
    assert valid_format(TASK, trajectory).tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 1]
    assert valid_format(TASK, trajectory, malus=0.5).tolist() == [1, -0.5, 1, 1, 1, 1, 1, 1, 1]
    assert command_succeeded(TASK, trajectory).tolist() == [1, 0, 1, 1, 1, 0, 1, 1, 0]
    assert command_succeeded(TASK, trajectory, but=["view", "run"]).tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 1]
    assert looked_at_failing_code(TASK, trajectory).tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert looked_at_failing_code(TASK, trajectory, once=False).tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 0]
    assert ran_tests(TASK, trajectory).tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert modified_code(TASK, trajectory).tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert modified_code(TASK, trajectory, once=False).tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 0]


def test_once_also_holds_for_consecutive_turns() -> None:
    signals = [{"ran_tests": False}, {"ran_tests": True}, {"ran_tests": True}, {"ran_tests": True}]
    assert ran_tests(TASK, sample_trajectory([1] * 4, turn_signals=signals)).tolist() == [0, 1, 0, 0]


def test_stepwise_rewards_of_an_episode_without_turns() -> None:
    assert ran_tests(TASK, sample_trajectory([])).tolist() == []
