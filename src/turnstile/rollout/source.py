"""Sources of a step's groups, as the training loop sees them.

Groups are played in turn with training, played ahead of it by another process (`rollout.max_staleness`), or read from
the record of a run.
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
    """The part of an engine that training uses: new weights in, sampling statistics out."""

    def publish(self, version: int) -> None:
        """Sample with the current weights from now on, as version `version`."""

    def take_stats(self) -> dict[str, float]:
        """Return what sampling cost since the last call."""


class GroupSource(Protocol):
    """Gives each step its groups, complete, and takes new weights."""

    async def next(self, step: int, report_progress: ReportProgress) -> list[Group]:
        """Return the groups of a step, once all its episodes have ended."""
        ...

    def publish(self, version: int) -> None:
        """Publish the weights after step `version`; tokens sampled from now on are of that version."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the position in the tasks after the last finished step: small JSON for a checkpoint."""
        ...

    def take_stats(self) -> dict[str, float]:
        """Return what sampling cost since the last call."""
        ...


def group_prefix(step: int) -> str:
    """Return what the ids of a step's groups begin with."""
    return f"train/{step}"


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return how many versions a step's sampled tokens are behind `version`, with which it begins."""
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    if not turns:
        return {"staleness/mean": 0.0, "staleness/max": 0.0}
    behind = version - np.concatenate([turn.completion.versions for turn in turns])
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


@dataclass(kw_only=True, slots=True)
class SyncSource:
    """Plays groups when training asks for them, with its current weights.

    Of an interrupted step only unfinished episodes are played; `say` reports how many were restored.
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
    """Return the line that says how many of a step's episodes were restored."""
    return f"step {step}: {number} of {total} episodes had finished before, and were not played again"


@dataclass(kw_only=True, slots=True)
class ReplaySource:
    """The groups of a recorded run, step by step, without an engine or an environment.

    Raises ReplayError if the record ends too early, or is of other tasks.
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
        """Advance the tasks; no engine samples with the weights."""
        self.sampler.next(self.groups)

    def state(self) -> Mapping[str, Any]:
        return self.sampler.state()

    def take_stats(self) -> dict[str, float]:
        return {}


def recorded_entries(run: Path, step: int, tasks: Sequence[Task]) -> Iterator[Entry]:
    """Yield what a run recorded of these tasks in a step, in their order. Raises ReplayError if a group is missing."""
    entries = {entry.group.id: entry for entry in read_record(run, phase="train", step=step)}
    for index, task in enumerate(tasks):
        name = f"{group_prefix(step)}/{index}/{task.id}"
        if name not in entries:
            raise ReplayError(f"run {str(run)!r} has no record of group {name!r}: it ended before, or had other tasks")
        yield entries[name]
