"""Training, on one page: play groups, judge them, give credit, update, publish, write down, go on.

Read this first. Every line of `train` is one room of the house; what is behind it is in the file the name says.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from turnstile.credit.base import Estimator, State
from turnstile.credit.turns import states_shared
from turnstile.errors import TrainingError
from turnstile.rewards.build import Scorer
from turnstile.rewards.rates import rates
from turnstile.rollout.group import Player
from turnstile.rollout.record import Recorder
from turnstile.rollout.tree import tree_tokens
from turnstile.tasks.base import TaskSampler
from turnstile.tracking.alarms import Alarm
from turnstile.tracking.base import Tracker
from turnstile.trainer.critic import Learned
from turnstile.trainer.learner import Learner, Objective, Trunk
from turnstile.trainer.prepare import prepare
from turnstile.trainer.reference import Annotator
from turnstile.trainer.step import Trained, per_group, update
from turnstile.types import Group, Score, Stop, Trajectory


class Publisher(Protocol):
    """The engine's side that the trainer sees: new weights, and what sampling cost."""

    def publish(self, version: int) -> None: ...

    def take_stats(self) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The numbers of a run. 0 for the `every`s means never."""

    steps: int
    groups: int
    attempts: int
    seed: int = 0
    epochs: int = 1
    minibatches: int = 1
    drop_flat: bool = True
    checkpoint_every: int = 0
    evaluate_every: int = 0


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run has come: everything that is not a weight and must survive a crash."""

    step: int = 0
    credit: State = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a training loop is made of; `build` puts them together."""

    player: Player
    sampler: TaskSampler
    scorer: Scorer
    estimator: Estimator
    learner: Learner
    objective: Objective
    trunk: Trunk | None  # what the engine knows of the frozen layers
    annotators: Sequence[Annotator]  # for losses that hold on to another policy
    learned: Learned | None  # what some estimators take from a part that learns beside the policy
    engine: Publisher
    tracker: Tracker
    recorder: Recorder
    alarms: Mapping[str, Alarm]
    evaluate: Callable[[int], Any]  # async (step) -> None
    checkpoint: Callable[[Progress], None]


async def train(parts: Parts, settings: Settings, progress: Progress) -> Progress:
    """Goes on from `progress` to the last step; returns where it stands.

    Raises TrainingError when infrastructure failed in every episode of a step.
    """
    parts.tracker.progress("training", progress.step, settings.steps)
    while progress.step < settings.steps:
        progress.step += 1
        parts.engine.take_stats()  # what an evaluation sampled in between is not of this step
        started = time.monotonic()
        tasks = parts.sampler.next(settings.groups)
        groups = await _play(parts, settings, progress.step, tasks)
        played = time.monotonic()
        _tell_failures(parts, progress.step, groups)

        scores = parts.scorer(groups)
        aux = {} if parts.learned is None else parts.learned.look(groups, scores)
        advantages, progress.credit = parts.estimator(groups, scores, aux, progress.credit)
        prepared = prepare(groups, scores, advantages, drop_flat=settings.drop_flat)
        for annotator in parts.annotators:
            rows = [annotator.annotate(group, parts.objective.sampling) for group in prepared.rows]
            prepared = replace(prepared, rows=rows)
        trained = update(
            groups,
            prepared,
            parts.learner,
            parts.objective,
            epochs=settings.epochs,
            minibatches=settings.minibatches,
            trunk=parts.trunk,
        )
        learned = {} if parts.learned is None else parts.learned.learn(groups, scores, aux)
        parts.engine.publish(progress.step)
        for annotator in parts.annotators:
            annotator.stepped(progress.step)

        for group, own, advantage, weight, logprob in zip(
            groups, scores, per_group(groups, advantages), trained.weights, trained.logprobs, strict=True
        ):
            parts.recorder.write(progress.step, "train", group, own, advantage, {"weight": weight, "logprob": logprob})
        metrics = _metrics(parts, groups, scores, trained, flat=prepared.flat)
        metrics |= learned
        metrics |= {"seconds/rollout": played - started, "seconds/step": time.monotonic() - started}
        parts.tracker.log(progress.step, metrics)
        for alarm in parts.alarms.values():
            if line := alarm.update(progress.step, metrics):
                parts.tracker.say(line, level="alarm")
        parts.tracker.progress("training", progress.step, settings.steps)

        if _due(progress.step, settings.evaluate_every) and progress.step < settings.steps:
            await parts.evaluate(progress.step)
        if _due(progress.step, settings.checkpoint_every) or progress.step == settings.steps:
            parts.checkpoint(progress)
    return progress


async def _play(parts: Parts, settings: Settings, step: int, tasks: list[Any]) -> list[Group]:
    total, done = len(tasks) * settings.attempts, 0

    def count(_: Trajectory) -> None:
        nonlocal done
        done += 1
        parts.tracker.progress(f"step {step}, episodes", done, total)

    label = f"train/{step}"
    return await parts.player.groups(tasks, settings.attempts, label=label, seed=settings.seed, done=count)


_NAMED = 3  # tasks that are named for each kind of failure


def _tell_failures(parts: Parts, step: int, groups: list[Group]) -> None:
    """Infrastructure failures are never silent, counted by kind and by task, so that neither a broken machine nor a
    policy that kills its judge can hide; and a step of nothing else ends the run."""
    everything = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [trajectory for trajectory in everything if trajectory.stop is Stop.ERROR]
    if not failed:
        return
    tasks: dict[str, Counter[str]] = {}
    for trajectory in failed:
        kind = (trajectory.error or "").partition(":")[0]
        tasks.setdefault(kind, Counter())[trajectory.task_id] += 1
    kinds = "; ".join(
        f"{kind} {counts.total()} ({', '.join(f'{task} {count}' for task, count in counts.most_common(_NAMED))}"
        f"{', ...' if len(counts) > _NAMED else ''})"
        for kind, counts in tasks.items()
    )
    line = f"step {step}: infrastructure failed in {len(failed)} of {len(everything)} episodes: {kinds}"
    line += f"; the first: {failed[0].error}"
    if len(failed) == len(everything):
        raise TrainingError(f"{line}; nothing is left to train on, mend it and run the same command again")
    parts.tracker.say(line, level="warning")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _metrics(
    parts: Parts, groups: list[Group], scores: list[list[Score]], trained: Trained, *, flat: int
) -> dict[str, float]:
    """Everything a step reports, by slash-separated names."""
    engine = parts.engine.take_stats()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sampled = engine["tokens_sampled"]
    return {
        **rates(groups, scores),
        **trained.metrics,
        "groups/flat": float(flat),
        "groups/all": float(len(groups)),
        "credit/states_shared": states_shared(groups),
        "tokens/sampled": sampled,
        "tokens/computed": engine["tokens_computed"],
        "tokens/rebuilt": engine["tokens_rebuilt"],
        "tokens/asked": engine["tokens_asked"] + sampled,
        "tokens/tree": float(sum(tree_tokens(group) for group in groups)),
        "engine/evicted": engine["evicted"],
        "tokens/per_second": sampled / max(engine["seconds"], 1e-9),
        "seconds/generate": engine["seconds"],
        "seconds/environment": sum(t.times.get("environment", 0.0) + t.times.get("measure", 0.0) for t in trajectories),
    }
