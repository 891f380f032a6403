"""The training loop: sample groups, score them, assign credit, update, publish, record, repeat.

Read this first. Each line of `train` calls one part of the code base; the imports name the files.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnstile.credit.base import Estimator, State, estimate, unread
from turnstile.credit.turns import states_shared
from turnstile.errors import TrainingError
from turnstile.records.record import REPLAYED, Recorder
from turnstile.rewards.build import Scorer
from turnstile.rewards.metrics import step_metrics
from turnstile.rollout.replay_buffer import ReplayBuffer, without_baseline
from turnstile.rollout.run_records import RunRecords
from turnstile.rollout.source import GroupSource, ReportProgress, SyncSource, staleness
from turnstile.rollout.tree import tree_tokens
from turnstile.tracking.alarms import Alarm
from turnstile.tracking.base import Tracker
from turnstile.trainer.activation_cache import RolloutActivations
from turnstile.trainer.critic import AuxiliaryModel
from turnstile.trainer.learner import Learner, Objective
from turnstile.trainer.prepare import prepare
from turnstile.trainer.reference import LogprobProvider
from turnstile.trainer.rehearsal import Rehearsal
from turnstile.trainer.step import UpdateResult, per_group, update
from turnstile.types import Group, Score, Stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The numbers that control a run. For `checkpoint_every` and `evaluate_every`, 0 means never."""

    steps: int
    epochs: int = 1
    minibatches: int = 1
    drop_zero_advantage: bool = True
    checkpoint_every: int = 0
    evaluate_every: int = 0


@dataclass(kw_only=True, slots=True)
class LoopState:
    """The loop's own state in a checkpoint, besides that of the weights and other parts."""

    step: int = 0
    credit: State = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParts:
    """The parts of a training loop, which `runs.train` builds."""

    source: GroupSource
    scorer: Scorer
    estimator: Estimator
    learner: Learner
    objective: Objective
    rollout_activations: RolloutActivations | None  # frozen-layer outputs that the engine kept
    logprob_providers: Sequence[LogprobProvider]  # for losses that compare the policy with other policies
    auxiliary: AuxiliaryModel | None  # a model trained beside the policy, such as a critic
    rehearsal: Rehearsal | None  # stored samples of the initial policy, trained on in every step
    buffer: ReplayBuffer  # attempts of earlier steps to train on again
    tracker: Tracker
    recorder: Recorder
    run_records: RunRecords
    alarms: Mapping[str, Alarm]
    evaluate: Callable[[int], Any]  # async (step) -> None
    checkpoint: Callable[[LoopState, Mapping[str, float]], None]


async def train(parts: TrainingParts, settings: Settings, progress: LoopState) -> LoopState:
    """Train from `progress` to the last step, and return the state reached.

    The coroutine may be cancelled while it awaits an evaluation or a rollout. In that case `progress`, the network and
    all other state are those of the last completed step, so that a checkpoint can be written. Raises TrainingError if
    all episodes of a step failed with an error.
    """
    parts.tracker.progress("training", progress.step, settings.steps)
    while progress.step < settings.steps:
        if _due(progress.step, settings.evaluate_every):
            await parts.evaluate(progress.step)
        step = progress.step + 1
        started = time.monotonic()
        fresh = await parts.source.next(step, _episode_progress(parts.tracker, step))
        played = time.monotonic()
        _report_failures(parts, step, fresh)
        _report_timeouts(parts, step, fresh)
        if step == 1 and (line := unread(parts.estimator, fresh)):
            parts.tracker.say(f"step {step}: {line}", level="warning")

        replayed = parts.buffer.draw(step)
        groups = [*fresh, *replayed]
        scores = [*parts.scorer(fresh), *without_baseline(parts.scorer(replayed))]
        aux = {} if parts.auxiliary is None else parts.auxiliary.predict(groups, scores)
        advantages, progress.credit = estimate(parts.estimator, groups, scores, aux, progress.credit)
        prepared = prepare(groups, scores, advantages, drop_zero_advantage=settings.drop_zero_advantage)
        _warn_if_no_gradient(parts, step, prepared.zero_advantage, len(groups))
        for provider in parts.logprob_providers:
            provider.on_step_start(groups, scores)
            rows = [provider.provide(group, parts.objective.sampling) for group in prepared.rows]
            prepared = replace(prepared, rows=rows)
        trained = update(
            groups,
            prepared,
            parts.learner,
            parts.objective,
            epochs=settings.epochs,
            minibatches=settings.minibatches,
            rollout_activations=parts.rollout_activations,
            stored=None if parts.rehearsal is None else (parts.rehearsal.rows(step), parts.rehearsal.objective),
        )
        auxiliary_metrics = {} if parts.auxiliary is None else parts.auxiliary.update(groups, scores, aux)
        updated = time.monotonic()
        parts.source.publish(step)
        published = time.monotonic()
        for provider in parts.logprob_providers:
            provider.on_step_end(step)
        progress.step = step

        credit = per_group(groups, advantages)
        for i, (group, group_scores) in enumerate(zip(groups, scores, strict=True)):
            label = "" if i < len(fresh) else REPLAYED
            parts.recorder.write(step, "train", group, group_scores, credit[i], trained.arrays(i), label=label)
        parts.run_records.finalize(step, fresh, scores[: len(fresh)], trained.passes)
        metrics = _metrics(parts, fresh, scores[: len(fresh)], trained, rollout=played - started)
        metrics |= {"groups/zero_advantage": float(prepared.zero_advantage), "groups/total": float(len(groups))}
        metrics |= auxiliary_metrics | staleness(fresh, step - 1) | parts.buffer.metrics(step)
        parts.buffer.keep(step, groups, credit, trained.passes)
        metrics |= {"seconds/publish": published - updated, "seconds/step": time.monotonic() - started}
        parts.tracker.log(step, metrics)
        for alarm in parts.alarms.values():
            if line := alarm.update(step, metrics):
                parts.tracker.say(line, level="alarm")
        parts.tracker.progress("training", step, settings.steps)
        if _due(step, settings.checkpoint_every) or step == settings.steps:
            parts.checkpoint(progress, metrics)
    return progress


def _episode_progress(tracker: Tracker, step: int) -> ReportProgress:
    return lambda done, total: tracker.progress(f"step {step}, episodes", done, total)


_TASKS_SHOWN = 3  # tasks named for each kind of failure


def _report_failures(parts: TrainingParts, step: int, groups: list[Group]) -> None:
    """Warn about failed episodes by kind of error and task. Raise TrainingError if all episodes failed.

    Errors of infrastructure and programs are always reported, so neither a broken machine nor a policy that crashes its
    judge goes unnoticed.
    """
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [trajectory for trajectory in episodes if trajectory.stop is Stop.ERROR]
    if not failed:
        return
    tasks: dict[str, Counter[str]] = {}
    for trajectory in failed:
        kind = (trajectory.error or "").partition(":")[0]
        tasks.setdefault(kind, Counter())[trajectory.task_id] += 1
    kinds = "; ".join(
        f"{kind} {counts.total()} ({', '.join(f'{task} {count}' for task, count in counts.most_common(_TASKS_SHOWN))}"
        f"{', ...' if len(counts) > _TASKS_SHOWN else ''})"
        for kind, counts in tasks.items()
    )
    line = f"step {step}: {len(failed)} of {len(episodes)} episodes failed: {kinds}"
    line += f"; the first: {failed[0].error}"
    if len(failed) == len(episodes):
        raise TrainingError(f"{line}; no episode is left to train on; fix the cause and run the same command again")
    parts.tracker.say(line, level="warning")


def _warn_if_no_gradient(parts: TrainingParts, step: int, zero_advantage: int, groups: int) -> None:
    """Warn if all groups of a step were dropped because their advantages are zero."""
    if groups and zero_advantage == groups:
        parts.tracker.say(
            f"step {step}: no group has a gradient: all advantages of all {groups} groups are 0, so nothing is learned",
            level="warning",
        )


def _report_timeouts(parts: TrainingParts, step: int, groups: list[Group]) -> None:
    """Warn about episodes that ran out of time, by task. Their outcomes are unknown."""
    stopped = Counter(t.task_id for group in groups for t in group.trajectories if t.stop is Stop.TIMEOUT)
    if stopped:
        tasks = ", ".join(f"{task} {count}" for task, count in stopped.most_common(_TASKS_SHOWN))
        more = ", ..." if len(stopped) > _TASKS_SHOWN else ""
        parts.tracker.say(f"step {step}: {stopped.total()} episodes ran out of time: {tasks}{more}", level="warning")


def _due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def _metrics(
    parts: TrainingParts, groups: list[Group], scores: list[list[Score]], trained: UpdateResult, *, rollout: float
) -> dict[str, float]:
    """Return the metrics of a step by slash-separated name. `rollout` is the seconds spent waiting for episodes."""
    engine = Counter(parts.source.take_stats())
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sampled, computed = engine["tokens_sampled"], engine["tokens_computed"]
    requested = engine["tokens_asked"] + sampled
    return {
        **step_metrics(groups, scores),
        **trained.metrics,
        "credit/states_shared": states_shared(groups),
        "tokens/sampled": sampled,
        "tokens/computed": computed,
        "tokens/recomputed": engine["tokens_rebuilt"],
        "tokens/speculated": engine["tokens_speculated"],
        "tokens/speculated_accepted": engine["tokens_accepted"],
        "tokens/requested": requested,
        "tokens/saved": requested - computed if computed else 0.0,  # servers do not report what they computed
        "tokens/tree": float(sum(tree_tokens(group) for group in groups)),
        "engine/evicted": engine["evicted"],
        "tokens/per_second": sampled / max(engine["seconds"], 1e-9),
        "seconds/rollout": rollout,
        "seconds/generate": engine["seconds"],
        **({"seconds/idle": max(0.0, rollout - engine["seconds"])} if isinstance(parts.source, SyncSource) else {}),
        "seconds/environment": sum(t.times.get("environment", 0.0) + t.times.get("measure", 0.0) for t in trajectories),
    }
