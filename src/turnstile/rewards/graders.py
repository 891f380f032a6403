"""Graders: they examine played episodes once, before these are scored, and what they find is recorded.

Rewards are functions of recorded signals. What needs more than one episode, a memory or another model is left to a
grader: it writes its findings into the signals of a trajectory or of its turns, so that a run can be scored again from
its record, without a judge, a server or the state of that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from turnstile.types import JSON, Group, Trajectory


class Grader(Protocol):
    """Adds signals to played groups.

    It is shown every group once: those of a training step, or (`step` None) those of an evaluation or of
    demonstrations, from which it must not learn.

    What it remembers is its `state`, JSON that goes into the checkpoint. An episode that infrastructure ended has
    nothing to examine and stays as it is; if the grader has no verdict of its own, the signal is None.

    A class that needs something of tasks may have a method `check(task)`, which raises ConfigError if it is missing. It
    is called with every task before a model is loaded, on an instance that is given None for a model.
    """

    async def grade(self, groups: Sequence[Group], step: int | None) -> list[Group]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    async def close(self) -> None: ...


class Stateless:
    """The part of a grader that remembers nothing and has nothing to release."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


def with_signals(trajectory: Trajectory, **signals: JSON) -> Trajectory:
    """Return the trajectory with further signals of its episode."""
    return replace(trajectory, signals={**trajectory.signals, **signals})


class Clock(Stateless):
    """Writes training_step, the number of the training step that an episode belongs to; None outside of training."""

    async def grade(self, groups: Sequence[Group], step: int | None) -> list[Group]:
        return [
            replace(group, trajectories=tuple(with_signals(one, training_step=step) for one in group.trajectories))
            for group in groups
        ]
