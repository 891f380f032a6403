"""Graders, which examine played episodes once, before they are scored, and record their findings.

Rewards are functions of recorded signals. Whatever needs several episodes, a memory or another model is left to a
grader. It writes its findings into the signals of a trajectory or of its turns, so that a run can be scored again from
its record, without a judge, a server or the grader's state at that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from turnstile.types import JSON, Group, Trajectory


class Grader(Protocol):
    """Adds signals to played groups.

    It is given every group once: the groups of a training step, or (with `step` None) groups of an evaluation or of
    demonstrations, from which it must not learn.

    Its memory is its `state`, JSON that goes into the checkpoint. It leaves an episode in which infrastructure failed
    unchanged. If the grader itself reaches no verdict, the signal is None.

    A class that requires something of tasks may have a method `check(task)` that raises ConfigError if it is missing.
    It is called with every task before a model is loaded, on an instance that was given None in place of a model.
    """

    async def grade(self, groups: Sequence[Group], step: int | None) -> list[Group]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    async def close(self) -> None: ...


class Stateless:
    """A base class for graders that remember nothing and have nothing to release."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing, since there is no state."""

    async def close(self) -> None:
        """Do nothing, since there is nothing to release."""


def with_signals(trajectory: Trajectory, **signals: JSON) -> Trajectory:
    """Return the trajectory with these signals added to those of the episode."""
    return replace(trajectory, signals={**trajectory.signals, **signals})


class Clock(Stateless):
    """Writes training_step, the number of the training step that an episode belongs to, or None outside training."""

    async def grade(self, groups: Sequence[Group], step: int | None) -> list[Group]:
        return [
            replace(group, trajectories=tuple(with_signals(one, training_step=step) for one in group.trajectories))
            for group in groups
        ]
