"""What is found out about played episodes before they are judged, once, and recorded with them.

Rewards are functions of recorded signals. What needs more than one episode, a memory or another model is a grader's:
it writes what it finds into the signals of a trajectory or of its turns, so that a run can be judged again from its
record, without a judge, a server or the state of that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field, NonNegativeFloat

from turnstile.errors import ConfigError
from turnstile.types import JSON, Group, Trajectory


class Grader(Protocol):
    """Looks at played groups and adds signals. It is shown every group once: of a training step, or (`step` None) of an
    evaluation or of demonstrations, from which it must not learn.

    What it remembers is its `state`, JSON that goes into the checkpoint. An episode that infrastructure ended has
    nothing to look at and stays as it is; where the grader has no verdict of its own, the signal is None.

    A class that needs something of tasks may have a method `check(task)`, which raises ConfigError where it is missing:
    every task is shown to it before a model is loaded, by an instance that is given None for a model.
    """

    async def grade(self, groups: Sequence[Group], step: int | None) -> list[Group]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    async def close(self) -> None: ...


class Stateless:
    """The part of a grader that remembers nothing and holds nothing."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """There is nothing to restore."""

    async def close(self) -> None:
        """Holds nothing."""


def told(trajectory: Trajectory, **signals: JSON) -> Trajectory:
    """The trajectory with further signals of its episode."""
    return replace(trajectory, signals={**trajectory.signals, **signals})


class Clock(Stateless):
    """Writes training_step, the number of the training step that an episode is of, None outside of training."""

    async def grade(self, groups: Sequence[Group], step: int | None) -> list[Group]:
        return [
            replace(group, trajectories=tuple(told(one, training_step=step) for one in group.trajectories))
            for group in groups
        ]


class TestRates(Stateless):
    """Writes test_weights, (1 - rate)^`power` for each test of the signal f2p_tests: what attempts rarely pass weighs
    more.

    The rate of a task's test is the share of its attempts that passed it, a moving average over the training steps:
    each step's share counts `pace`, all of it the first time. The step's own attempts count too, so a test is weighed
    by what is known when the step is judged. Attempts without a verdict count nowhere; outside of training nothing is
    learned, and a task that was not trained on is weighed by its attempts there. Raises ConfigError for `power` below
    0 and `pace` outside (0, 1].
    """

    __test__ = False  # no test case, whatever its name begins with

    def __init__(self, *, power: NonNegativeFloat = 1.0, pace: Annotated[float, Field(gt=0, le=1)] = 0.5) -> None:
        if power < 0.0 or not 0.0 < pace <= 1.0:
            raise ConfigError(f"grader 'test_rates' wants power >= 0 and 0 < pace <= 1, got {power} and {pace}")
        self._power, self._pace = power, pace
        self._rates: dict[str, dict[str, float]] = {}

    async def grade(self, groups: Sequence[Group], step: int | None) -> list[Group]:
        return [self._weighed(group, learn=step is not None) for group in groups]

    def state(self) -> dict[str, Any]:
        return {"rates": {task: dict(rates) for task, rates in self._rates.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rates = {task: dict(rates) for task, rates in state["rates"].items()}

    def _weighed(self, group: Group, *, learn: bool) -> Group:
        verdicts = [one.signals["f2p_tests"] for one in group.trajectories if one.signals.get("f2p_tests") is not None]
        known = self._rates.get(group.task.id, {})
        rates = dict(known)
        for test in dict.fromkeys(test for verdict in verdicts for test in verdict):
            share = float(np.mean([bool(verdict[test]) for verdict in verdicts if test in verdict]))
            if test not in known:
                rates[test] = share
            elif learn:
                rates[test] = known[test] + self._pace * (share - known[test])
        if learn and verdicts:
            self._rates[group.task.id] = rates
        weights = {test: (1.0 - rate) ** self._power for test, rate in rates.items()}
        return replace(
            group,
            trajectories=tuple(
                told(one, test_weights=weights) if "f2p_tests" in one.signals else one for one in group.trajectories
            ),
        )
