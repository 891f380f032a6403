"""Where the groups of a step come from, as the training loop sees it: played in turn with training, played ahead of it
by another process (`rollout.max_staleness`), or read from the record of a run."""

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
"""(episodes of the step that are done, all of them)"""
Say = Callable[[str], None]


class Publisher(Protocol):
    """An engine's side that training sees: new weights, and what sampling cost."""

    def publish(self, version: int) -> None: ...

    def take_stats(self) -> dict[str, float]: ...


class GroupSource(Protocol):
    """Gives each step its groups, whole, and takes new weights."""

    async def next(self, step: int, report_progress: ReportProgress) -> list[Group]: ...

    def publish(self, version: int) -> None:
        """Step `version` is done and has changed the weights; the tokens sampled from now on are of that version."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Where the tasks stand behind the last step that is done: small JSON that belongs in a checkpoint."""
        ...

    def take_stats(self) -> dict[str, float]:
        """What sampling cost since the last call."""
        ...


def group_prefix(step: int) -> str:
    """What the ids of a step's groups begin with."""
    return f"train/{step}"


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions the sampled tokens of a step are behind `version`, that of the weights it begins with."""
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    if not turns:
        return {"staleness/mean": 0.0, "staleness/max": 0.0}
    behind = version - np.concatenate([turn.completion.versions for turn in turns])
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


@dataclass(kw_only=True, slots=True)
class SyncSource:
    """Groups are played when training asks for them, with the weights that it has by then. Of a step that was
    interrupted, only what had not finished is played; `say` is told."""

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
    return f"step {step}: {number} of {total} episodes had finished before, and were not played again"


@dataclass(kw_only=True, slots=True)
class ReplaySource:
    """The groups of a recorded run, step by step, without an engine or an environment.

    Raises ReplayError where the record ends, or is of other tasks.
    """

    run: Path
    records: RunRecords
    sampler: TaskSampler
    groups: int

    async def next(self, step: int, report_progress: ReportProgress) -> list[Group]:
        found = [entry.group for entry in recorded_entries(self.run, step, self.sampler.peek(self.groups))]
        played = {trajectory.key: trajectory for group in found for trajectory in group.trajectories}
        self.records.ledger.issue(step, [(key, each.task_id) for key, each in played.items()], played)
        report_progress(len(played), len(played))
        return found

    def publish(self, version: int) -> None:
        """There is nobody to sample with the weights."""
        self.sampler.next(self.groups)

    def state(self) -> Mapping[str, Any]:
        return self.sampler.state()

    def take_stats(self) -> dict[str, float]:
        return {}


def recorded_entries(run: Path, step: int, tasks: Sequence[Task]) -> Iterator[Entry]:
    """What a run recorded of these tasks in a step, in their order. Raises ReplayError where that is missing."""
    entries = {entry.group.id: entry for entry in read_record(run, phase="train", step=step)}
    for place, task in enumerate(tasks):
        name = f"{group_prefix(step)}/{place}/{task.id}"
        if name not in entries:
            raise ReplayError(f"run {str(run)!r} has recorded no group {name!r}: it ended before, or had other tasks")
        yield entries[name]
