"""Sources that provide each training step with its groups.

Groups are played alternately with training, played ahead of it by another process (`rollout.max_staleness`), or read
from the record of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turnstile.errors import ReplayError
from turnstile.records.record import Entry, read_record
from turnstile.rollout.group import Player
from turnstile.rollout.run_records import RunRecords
from turnstile.tasks.base import TaskSampler
from turnstile.types import Group, Task, Trajectory

ReportProgress = Callable[[int, int], None]
"""(finished episodes of the step, all its episodes)"""
Say = Callable[[str], None]
"""Prints one line for the user."""


class Publisher(Protocol):
    """The part of an engine that training uses: it takes new weights and reports sampling statistics."""

    def publish(self, version: int) -> None:
        """Use the current weights for sampling from now on, as version `version`."""

    def take_stats(self) -> dict[str, float]:
        """Return the sampling statistics accumulated since the last call."""


class GroupSource(Protocol):
    """Provides each step with its complete groups, and takes new weights."""

    async def next(self, step: int, report_progress: ReportProgress) -> list[Group]:
        """Return the groups of a step, once all its episodes have ended."""
        ...

    def publish(self, version: int) -> None:
        """Publish the weights after step `version`. Tokens sampled from now on have that version."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the position in the tasks after the last finished step, as small JSON for a checkpoint."""
        ...

    def take_stats(self) -> dict[str, float]:
        """Return the sampling statistics accumulated since the last call."""
        ...


def group_prefix(step: int) -> str:
    """Return the prefix of the ids of a step's groups."""
    return f"train/{step}"


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return the mean and the maximum of how many versions a step's sampled tokens are behind `version`.

    `version` is that of the weights with which the step begins.
    """
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    if not turns:
        return {"staleness/mean": 0.0, "staleness/max": 0.0}
    behind = version - np.concatenate([turn.completion.versions for turn in turns])
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


@dataclass(kw_only=True, slots=True)
class SyncSource:
    """Plays groups with the current weights when training asks for them.

    When a step was interrupted, only its unfinished episodes are played; `say` reports how many were restored.
    """

    player: Player
    records: RunRecords
    sampler: TaskSampler
    engine: Publisher
    groups: int
    attempts: int
    seed: int
    say: Say = lambda _: None

    async def next(self, step: int, report_progress: ReportProgress) -> list[Group]:
        tasks = self.sampler.peek(self.groups)
        total, done = len(tasks) * self.attempts, 0

        def count(_: Trajectory) -> None:
            nonlocal done
            done += 1
            report_progress(done, total)

        callback = self.records.callback(step)
        groups = await self.player.groups(
            tasks, self.attempts, label=group_prefix(step), seed=self.seed, step=step, done=count, callback=callback
        )
        if callback.restored:
            self.say(restored_message(step, callback.restored, total))
        return groups

    def publish(self, version: int) -> None:
        self.sampler.next(self.groups)
        self.engine.publish(version)

    def state(self) -> Mapping[str, Any]:
        return self.sampler.state()

    def take_stats(self) -> dict[str, float]:
        return self.engine.take_stats()


def restored_message(step: int, number: int, total: int) -> str:
    """Return the message that says how many of a step's episodes were restored."""
    return f"step {step}: {number} of {total} episodes had finished before, and were not played again"


@dataclass(kw_only=True, slots=True)
class ReplaySource:
    """Replays the groups of a recorded run, step by step, without an engine or an environment.

    `next` raises ReplayError if the record ends too early or is from other tasks.
    """

    run: Path
    records: RunRecords
    sampler: TaskSampler
    groups: int

    async def next(self, step: int, report_progress: ReportProgress) -> list[Group]:
        groups = [entry.group for entry in recorded_entries(self.run, step, self.sampler.peek(self.groups))]
        played = {trajectory.key: trajectory for group in groups for trajectory in group.trajectories}
        self.records.ledger.issue(step, [(key, each.task_id) for key, each in played.items()], played)
        report_progress(len(played), len(played))
        return groups

    def publish(self, version: int) -> None:
        """Advance the tasks. The weights are not published, since nothing is sampled."""
        self.sampler.next(self.groups)

    def state(self) -> Mapping[str, Any]:
        return self.sampler.state()

    def take_stats(self) -> dict[str, float]:
        return {}


def recorded_entries(run: Path, step: int, tasks: Sequence[Task]) -> Iterator[Entry]:
    """Yield the recorded entry of each task's group in a step, in the order of `tasks`.

    Raises ReplayError if a group is missing.
    """
    entries = {entry.group.id: entry for entry in read_record(run, phase="train", step=step)}
    for index, task in enumerate(tasks):
        name = f"{group_prefix(step)}/{index}/{task.id}"
        if name not in entries:
            raise ReplayError(f"run {str(run)!r} has no record of group {name!r}: it ended before, or had other tasks")
        yield entries[name]
