"""Training, on one page: play groups, judge them, give credit, update, publish, write down, go on.

Read this first. Every line of `train` is one room of the house; what is behind it is in the file the name says.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnstile.credit.base import Estimator, State, unread
from turnstile.credit.turns import states_shared
from turnstile.errors import TrainingError
from turnstile.records.record import AGAIN, Recorder
from turnstile.rewards.build import Scorer
from turnstile.rewards.rates import rates
from turnstile.rollout.replay_buffer import ReplayBuffer, outside
from turnstile.rollout.run_records import RunRecords
from turnstile.rollout.source import GroupSource, SyncSource, Tell, staleness
from turnstile.rollout.tree import tree_tokens
from turnstile.tracking.alarms import Alarm
from turnstile.tracking.base import Tracker
from turnstile.trainer.activation_cache import RolloutActivations
from turnstile.trainer.critic import AuxiliaryModel
from turnstile.trainer.learner import Learner, Objective
from turnstile.trainer.prepare import prepare
from turnstile.trainer.reference import LogprobProvider
from turnstile.trainer.rehearsal import Rehearsal
from turnstile.trainer.step import Trained, per_group, update
from turnstile.types import Group, Score, Stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The numbers of a run. 0 for the `every`s means never."""

    steps: int
    epochs: int = 1
    minibatches: int = 1
    drop_zero_advantage: bool = True
    checkpoint_every: int = 0
    evaluate_every: int = 0


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run has come: everything that is not a weight and must survive a crash."""

    step: int = 0
    credit: State = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParts:
    """What a training loop is made of; `build` puts them together."""

    source: GroupSource
    scorer: Scorer
    estimator: Estimator
    learner: Learner
    objective: Objective
    trunk: RolloutActivations | None  # what the engine knows of the frozen layers
    logprob_providers: Sequence[LogprobProvider]  # for losses that hold on to another policy
    auxiliary: AuxiliaryModel | None  # what some estimators take from a part that learns beside the policy
    rehearsal: Rehearsal | None  # samples of the policy that RL began with, to learn from beside what is played
    buffer: ReplayBuffer  # attempts of earlier steps that are trained on again
    tracker: Tracker
    recorder: Recorder
    books: RunRecords
    alarms: Mapping[str, Alarm]
    evaluate: Callable[[int], Any]  # async (step) -> None
    checkpoint: Callable[[Progress, Mapping[str, float]], None]


async def train(parts: TrainingParts, settings: Settings, progress: Progress) -> Progress:
    """Goes on from `progress` to the last step; returns where it stands.

    It waits only while it evaluates and plays. Whoever cancels it there finds `progress`, the network and all the rest
    as the last whole step left them, fit for a checkpoint. Raises TrainingError when infrastructure failed in every
    episode of a step.
    """
    parts.tracker.progress("training", progress.step, settings.steps)
    while progress.step < settings.steps:
        if _due(progress.step, settings.evaluate_every):
            await parts.evaluate(progress.step)
        step = progress.step + 1
        started = time.monotonic()
        fresh = await parts.source.next(step, _teller(parts.tracker, step))
        played = time.monotonic()
        _tell_failures(parts, step, fresh)
        _tell_stopped(parts, step, fresh)
        if step == 1 and (line := unread(parts.estimator, fresh)):
            parts.tracker.say(f"step {step}: {line}", level="warning")

        again = parts.buffer.draw(step)
        groups = [*fresh, *again]
        scores = [*parts.scorer(fresh), *outside(parts.scorer(again))]
        aux = {} if parts.auxiliary is None else parts.auxiliary.predict(groups, scores)
        advantages, progress.credit = parts.estimator(groups, scores, aux, progress.credit)
        prepared = prepare(groups, scores, advantages, drop_zero_advantage=settings.drop_zero_advantage)
        _tell_flat(parts, step, prepared.flat, len(groups))
        for annotator in parts.logprob_providers:
            annotator.on_step_start(groups, scores)
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
            stored=None if parts.rehearsal is None else (parts.rehearsal.rows(step), parts.rehearsal.objective),
        )
        learned = {} if parts.auxiliary is None else parts.auxiliary.update(groups, scores, aux)
        learnt = time.monotonic()
        parts.source.publish(step)
        published = time.monotonic()
        for annotator in parts.logprob_providers:
            annotator.on_step_end(step)
        progress.step = step

        credit = per_group(groups, advantages)
        for place, (group, own) in enumerate(zip(groups, scores, strict=True)):
            label = "" if place < len(fresh) else AGAIN
            parts.recorder.write(step, "train", group, own, credit[place], trained.arrays(place), label=label)
        parts.books.finalize(step, fresh, scores[: len(fresh)], trained.passes)
        metrics = _metrics(parts, fresh, scores[: len(fresh)], trained, rollout=played - started)
        metrics |= {"groups/zero_advantage": float(prepared.flat), "groups/total": float(len(groups))}
        metrics |= learned | staleness(fresh, step - 1) | parts.buffer.metrics(step)
        parts.buffer.keep(step, groups, credit, trained.passes)
        metrics |= {"seconds/publish": published - learnt, "seconds/step": time.monotonic() - started}
        parts.tracker.log(step, metrics)
        for alarm in parts.alarms.values():
            if line := alarm.update(step, metrics):
                parts.tracker.say(line, level="alarm")
        parts.tracker.progress("training", step, settings.steps)
        if _due(step, settings.checkpoint_every) or step == settings.steps:
            parts.checkpoint(progress, metrics)
    return progress


def _teller(tracker: Tracker, step: int) -> Tell:
    return lambda done, total: tracker.progress(f"step {step}, episodes", done, total)


_NAMED = 3  # tasks that are named for each kind of failure


def _tell_failures(parts: TrainingParts, step: int, groups: list[Group]) -> None:
    """Failures of infrastructure and faults of the program are never silent, counted by kind and by task, so that
    neither a broken machine nor a policy that kills its judge can hide; and a step of nothing else ends the run."""
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
    line = f"step {step}: no verdict on {len(failed)} of {len(everything)} episodes: {kinds}"
    line += f"; the first: {failed[0].error}"
    if len(failed) == len(everything):
        raise TrainingError(f"{line}; nothing is left to train on, mend it and run the same command again")
    parts.tracker.say(line, level="warning")


def _tell_flat(parts: TrainingParts, step: int, flat: int, groups: int) -> None:
    """A step that learns nothing says so."""
    if groups and flat == groups:
        parts.tracker.say(
            f"step {step}: no group has a gradient: in each of {groups} all attempts came to the same, so nothing is "
            "learned",
            level="warning",
        )


def _tell_stopped(parts: TrainingParts, step: int, groups: list[Group]) -> None:
    """Episodes that the clock has stopped are listed: what they would have come to, nobody knows."""
    stopped = Counter(t.task_id for group in groups for t in group.trajectories if t.stop is Stop.TIMEOUT)
    if stopped:
        named = ", ".join(f"{task} {count}" for task, count in stopped.most_common(_NAMED))
        more = ", ..." if len(stopped) > _NAMED else ""
        parts.tracker.say(f"step {step}: the clock stopped {stopped.total()} episodes: {named}{more}", level="warning")


def _due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def _metrics(
    parts: TrainingParts, groups: list[Group], scores: list[list[Score]], trained: Trained, *, rollout: float
) -> dict[str, float]:
    """Everything a step reports, by slash-separated names; `rollout` is the seconds it waited for its episodes."""
    engine = Counter(parts.source.take_stats())
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sampled, computed = engine["tokens_sampled"], engine["tokens_computed"]
    asked = engine["tokens_asked"] + sampled
    return {
        **rates(groups, scores),
        **trained.metrics,
        "credit/states_shared": states_shared(groups),
        "tokens/sampled": sampled,
        "tokens/computed": computed,
        "tokens/recomputed": engine["tokens_rebuilt"],
        "tokens/speculated": engine["tokens_speculated"],
        "tokens/speculated_accepted": engine["tokens_accepted"],
        "tokens/requested": asked,
        "tokens/saved": asked - computed if computed else 0.0,  # servers do not say what they computed
        "tokens/tree": float(sum(tree_tokens(group) for group in groups)),
        "engine/evicted": engine["evicted"],
        "tokens/per_second": sampled / max(engine["seconds"], 1e-9),
        "seconds/rollout": rollout,
        "seconds/generate": engine["seconds"],
        **({"seconds/idle": max(0.0, rollout - engine["seconds"])} if isinstance(parts.source, SyncSource) else {}),
        "seconds/environment": sum(t.times.get("environment", 0.0) + t.times.get("measure", 0.0) for t in trajectories),
    }
