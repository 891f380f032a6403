"""Where the groups of a step come from, as the training loop sees it: played in turn with training, played ahead of it
by another process (`rollout.ahead`), or read from the record of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turnstile.errors import ReplayError
from turnstile.rollout.group import Player
from turnstile.rollout.record import Entry, read_record
from turnstile.tasks.base import TaskSampler
from turnstile.types import Group, Task, Trajectory

Tell = Callable[[int, int], None]
"""(episodes of the step that are done, all of them)"""


class Publisher(Protocol):
    """An engine's side that training sees: new weights, and what sampling cost."""

    def publish(self, version: int) -> None: ...

    def take_stats(self) -> dict[str, float]: ...


class GroupSource(Protocol):
    """Gives each step its groups, whole, and takes new weights."""

    async def next(self, step: int, tell: Tell) -> list[Group]: ...

    def publish(self, version: int) -> None:
        """The weights have changed; the tokens sampled from now on are of `version`."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Where the tasks stand behind the last step that was given: small JSON that belongs in a checkpoint."""
        ...

    def take_stats(self) -> dict[str, float]:
        """What sampling cost since the last call."""
        ...


def label(step: int) -> str:
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
class InTurn:
    """Groups are played when training asks for them, with the weights that it has by then."""

    player: Player
    sampler: TaskSampler
    engine: Publisher
    groups: int
    attempts: int
    seed: int

    async def next(self, step: int, tell: Tell) -> list[Group]:
        tasks = self.sampler.next(self.groups)
        total, done = len(tasks) * self.attempts, 0

        def count(_: Trajectory) -> None:
            nonlocal done
            done += 1
            tell(done, total)

        return await self.player.groups(tasks, self.attempts, label=label(step), seed=self.seed, done=count)

    def publish(self, version: int) -> None:
        self.engine.publish(version)

    def state(self) -> Mapping[str, Any]:
        return self.sampler.state()

    def take_stats(self) -> dict[str, float]:
        return self.engine.take_stats()


@dataclass(kw_only=True, slots=True)
class Replay:
    """The groups of a recorded run, step by step, without an engine or an environment.

    Raises ReplayError where the record ends, or is of other tasks.
    """

    run: Path
    sampler: TaskSampler
    groups: int
    _stats: dict[str, float] = field(default_factory=dict, init=False)

    async def next(self, step: int, tell: Tell) -> list[Group]:
        tasks = self.sampler.next(self.groups)
        found = [entry.group for entry in recorded(self.run, step, tasks)]
        total = sum(len(group.trajectories) for group in found)
        tell(total, total)
        return found

    def publish(self, version: int) -> None:
        """There is nobody to sample with them."""

    def state(self) -> Mapping[str, Any]:
        return self.sampler.state()

    def take_stats(self) -> dict[str, float]:
        return {}


def recorded(run: Path, step: int, tasks: Sequence[Task]) -> Iterator[Entry]:
    """What a run recorded of these tasks in a step, in their order. Raises ReplayError where that is missing."""
    entries = {entry.group.id: entry for entry in read_record(run, phase="train", step=step)}
    for place, task in enumerate(tasks):
        name = f"{label(step)}/{place}/{task.id}"
        if name not in entries:
            raise ReplayError(f"run {str(run)!r} has recorded no group {name!r}: it ended before, or had other tasks")
        yield entries[name]


def parted(run: Path, other: Path) -> str:
    """Where the record of one run first differs from another's in what was credited or in the log-probabilities that
    the trainer found, in words; "" where all of it is the same to the last bit."""
    others = read_record(other, phase="train")
    for entry in read_record(run, phase="train"):
        same = next(others, None)
        if same is None:
            return f"{str(other)!r} ends before step {entry.step}"
        where = f"they part at step {entry.step}, group {entry.group.id!r}"
        if (same.step, same.group.id) != (entry.step, entry.group.id):
            return f"{where}: the other has {same.group.id!r} there"
        for name in ("advantages", *entry.trained):
            own = entry.advantages if name == "advantages" else entry.trained[name]
            its = same.advantages if name == "advantages" else same.trained.get(name)
            for number, (ours, theirs) in enumerate(zip(own or (), its or (), strict=True)):
                for turn, (left, right) in enumerate(zip(ours, theirs, strict=True)):
                    if not np.array_equal(left, right):
                        gap = float(np.abs(left - right).max())
                        return f"{where}: {name} of attempt {number}, turn {turn} differs by up to {gap:.2g}"
    return ""
