"""A run in progress, with its parts, its evaluations, and the cost of each of its stages."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from turnstile.config import Kind, Recipe
from turnstile.engines.base import Engine
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.evaluation.metrics import EpisodeResult, compared_rates, from_group, with_verdict
from turnstile.records.record import Recorder, label_of
from turnstile.rewards.build import Scorer
from turnstile.rollout.group import Player
from turnstile.rollout.run_records import RunRecords
from turnstile.rollout.source import Publisher
from turnstile.runs.run_folder import read_results, write_results, write_whole
from turnstile.runs.scripted import play_policy
from turnstile.tracking.base import Tracker
from turnstile.types import Group, Task, Trajectory
from turnstile.wiring.agent import EVALUATION, Agent, for_evaluation
from turnstile.wiring.world import World


class PublishingEngine(Engine, Publisher, Protocol):
    """An engine that samples with published weights."""


@dataclass(kw_only=True, slots=True)
class RunContext:
    """The parts of a run in progress. `engine` is the agent's own, or servers in its place."""

    recipe: Recipe
    folder: Path
    world: World
    agent: Agent
    engine: PublishingEngine
    player: Player
    scorer: Scorer
    tracker: Tracker
    recorder: Recorder
    records: RunRecords
    train_tasks: list[Task]
    heldout: list[Task]

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds of a stage, and its peak memory, to costs.json in the run folder.

        If a stage continues after an interruption, its seconds are added up.
        """
        began, others = time.monotonic(), sum(read_costs(self.folder)["seconds"].values())
        try:
            yield
        finally:
            costs = read_costs(self.folder)
            inside = sum(costs["seconds"].values()) - others  # stages within this one are counted separately
            took = time.monotonic() - began - inside
            costs["seconds"][stage] = costs["seconds"].get(stage, 0.0) + took
            costs["memory_mb"][stage] = max(costs["memory_mb"].get(stage, 0.0), peak_memory_mb())
            write_whole(self.folder / "costs.json", json.dumps(costs, indent=1))

    def untrained(self) -> AbstractContextManager[None]:
        """Return a context for sampling episodes that are not trained on.

        A local engine keeps no activations within it.
        """
        return self.engine.without_activations() if isinstance(self.engine, TransformersEngine) else nullcontext()

    async def evaluate(self, name: str, tasks: Sequence[Task], *, samples: int, step: int = 0) -> None:
        """Play `tasks` with the current model and record the evaluation, unless it is already there."""
        if name in read_results(self.folder) or not tasks:
            return
        player = for_evaluation(self.recipe, self.player)
        done = counter(self.tracker, f"evaluating {name}", len(tasks) * samples)
        with self.timed(f"evaluate {name}"), self.untrained():
            groups = await player.groups(
                tasks, samples, label=f"eval/{name}", seed=self.recipe.seed, stream=EVALUATION, done=done
            )
        self.engine.take_stats()  # they belong to no step
        self.finish(name, groups, step)

    async def compare(self, name: str, kind: Kind, tasks: Sequence[Task]) -> None:
        """Play `tasks` with a policy that is not a model and record the evaluation, unless it is already there."""
        if name in read_results(self.folder) or not tasks:
            return
        done = counter(self.tracker, f"evaluating {name}", len(tasks))
        groups = await play_policy(self.recipe, self.world, self.agent.scaffold, kind, tasks, done)
        self.finish(name, groups, 0)

    def finish(self, name: str, groups: Sequence[Group], step: int) -> None:
        """Write an evaluation's episodes and results, and report its mean rates."""
        scores = self.scorer(groups)
        for group, own in zip(groups, scores, strict=True):
            self.recorder.write(step, "eval", group, own, label=label_of(name))
        self.recorder.sync()
        results = [result for group, own in zip(groups, scores, strict=True) for result in from_group(group, own)]
        write_results(self.folder, name, results)
        self.tracker.say(f"{name}: {_rates(results)}")


def counter(tracker: Tracker, label: str, total: int) -> Callable[[Trajectory], None]:
    """Return a callback that counts finished episodes, and reports the count of `total` as progress."""
    done = 0
    tracker.progress(label, 0, total)

    def count(_: Trajectory) -> None:
        nonlocal done
        done += 1
        tracker.progress(label, done, total)

    return count


def _rates(results: Sequence[EpisodeResult]) -> str:
    found = with_verdict(results)
    if not found:
        return f"{len(results)} episodes, none with a verdict"
    means = (f"{name} {np.mean([result.value(name) for result in found]):.3f}" for name in compared_rates(found))
    return f"{', '.join(means)} ({len(found)} episodes)"


def read_costs(folder: Path) -> dict[str, dict[str, float]]:
    """Return the seconds and the peak memory in megabytes of each stage."""
    file = folder / "costs.json"
    if not file.is_file():
        return {"seconds": {}, "memory_mb": {}}
    costs: dict[str, dict[str, float]] = json.loads(file.read_text(encoding="utf-8"))
    return costs


def peak_memory_mb() -> float:
    """Return the peak memory of this process plus that of its largest finished child, in MB."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1024
