"""What is found out about played episodes before they are judged, once, and recorded with them.

Rewards are functions of recorded signals. What needs more than one episode, a memory or another model is a grader's:
it writes what it finds into the signals of a trajectory or of its turns, so that a run can be judged again from its
record, without a judge, a server or the state of that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

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
