"""What looks at played groups before they are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from plays import FakeEnv, player, tasks
from turnstile.credit.samples import sample_trajectory
from turnstile.errors import ConfigError
from turnstile.rewards.graders import Clock
from turnstile.swe.rewards import TestRates
from turnstile.types import Group, Stop, Task, Trajectory


def group(*verdicts: Mapping[str, bool] | None, task: str = "t") -> Group:
    attempts = [
        sample_trajectory([1], task=task, attempt=number, signals={"f2p_tests": verdict})
        for number, verdict in enumerate(verdicts)
    ]
    return Group(id=f"g/{task}", task=Task(id=task, env="e"), trajectories=tuple(attempts))


def weights(trajectory: Trajectory) -> Mapping[str, float]:
    found: Mapping[str, float] = trajectory.signals["test_weights"]
    return found


async def test_a_test_weighs_what_its_pass_rate_leaves() -> None:
    rates = TestRates()
    first = group({"a": True, "b": False}, {"a": True, "b": True}, {"a": True, "b": False}, {"a": True, "b": False})
    (found,) = await rates.grade([first], 1)
    assert [weights(one) for one in found.trajectories] == [{"a": 0.0, "b": 0.75}] * 4
    (found,) = await rates.grade([group({"a": False, "b": True}, {"a": True, "b": True})], 2)
    assert weights(found.trajectories[0]) == {"a": 1 - (1 + 0.5) / 2, "b": 1 - (0.25 + 1.0) / 2}


async def test_power_and_pace_are_knobs_with_limits() -> None:
    rates = TestRates(power=2.0, pace=0.25)
    await rates.grade([group({"a": True}, {"a": False})], 1)
    (found,) = await rates.grade([group({"a": True})], 2)
    assert weights(found.trajectories[0]) == {"a": pytest.approx((1 - 0.625) ** 2)}
    for knobs in ({"power": -1.0}, {"pace": 0.0}, {"pace": 1.5}):
        with pytest.raises(ConfigError, match="wants power >= 0 and 0 < pace <= 1"):
            TestRates(**knobs)


async def test_nothing_is_learned_outside_of_training_or_without_a_verdict() -> None:
    rates = TestRates()
    await rates.grade([group({"a": True}, {"a": False})], 1)
    before = rates.state()
    (found,) = await rates.grade([group({"a": True}, {"a": True})], None)
    assert weights(found.trajectories[1]) == {"a": 0.5}
    (new,) = await rates.grade([group({"b": True}, {"b": False}, task="other")], None)
    assert weights(new.trajectories[0]) == {"b": 0.5}
    (unknown,) = await rates.grade([group(None, {"a": False})], 2)
    assert [weights(one) for one in unknown.trajectories] == [{"a": 0.75}] * 2
    assert before == {"rates": {"t": {"a": 0.5}}}
    again = TestRates()
    again.restore(before)
    assert again.state() == before
    bare = group({"a": True})
    broken = replace(bare, trajectories=(replace(bare.trajectories[0], signals={}, stop=Stop.ERROR),))
    assert await rates.grade([broken], 3) == [broken]


async def test_the_player_gives_played_groups_to_graders_with_the_step() -> None:
    playing = player(FakeEnv, graders=(Clock(),))
    for step in (3, None):
        found = await playing.groups(tasks(2), 2, label="x", seed=0, step=step)
        signals = [one.signals for played in found for one in played.trajectories]
        assert signals == [{"steps": 3, "training_step": step}] * 4
    opening = found[0].trajectories[0].opening
    assert [(message.role, message.content) for message in opening] == [("user", "Go.")]
