"""`turnstile train`: baselines, warm start, reinforcement learning, evaluation, report; each stage once per run."""

from __future__ import annotations

import asyncio
import functools
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turnstile.build.kinds import bind
from turnstile.build.parts import (
    Agent,
    World,
    for_evaluation,
    make_agent,
    make_learner,
    make_objective,
    make_player,
    make_scorer,
    make_trackers,
    make_world,
    overlap,
    read_tasks,
)
from turnstile.build.report import report
from turnstile.build.run_folder import open_run, read_results, write_results
from turnstile.build.scripts import demonstrate, play_policy
from turnstile.config import Kind, Recipe
from turnstile.envs.base import Env
from turnstile.errors import ConfigError
from turnstile.evaluation.metrics import EpisodeResult, from_group
from turnstile.rewards.build import Scorer
from turnstile.rollout.group import Player
from turnstile.rollout.record import Recorder
from turnstile.tasks.base import TaskSampler
from turnstile.tracking.alarms import standard_alarms
from turnstile.tracking.base import Tracker
from turnstile.trainer import checkpoint
from turnstile.trainer.learner import Learner, Objective, Plan
from turnstile.trainer.loop import Parts, Progress, Settings
from turnstile.trainer.loop import train as train_loop
from turnstile.trainer.warmstart import demo_rows, warm_start
from turnstile.types import F32, Group, Sampling, Task, Trajectory

UNTOUCHED, WARM, FINAL = "untouched", "warmstart", "trained"
"""The evaluations every run has, besides those of `eval.policies` and of steps in between."""


def train(
    recipe: Recipe,
    *,
    run: Path,
    fresh: bool = False,
    overfit: str | None = None,
    env: Callable[..., Env] | None = None,
    reward: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Runs a recipe in the folder `run`, going on where an earlier call stopped.

    `overfit` trains and evaluates on that one task. `env` and `reward` take the place of the recipe's: any
    callable that makes an environment, any function `(task, trajectory) -> float`. Returns the run's summary:
    `results` (evaluation name -> list of EpisodeResult), `report` (path), `run`, `step`.
    """
    return asyncio.run(_train(recipe, run, fresh, overfit, env, reward))


@dataclass(kw_only=True, slots=True)
class _Run:
    """A run in progress: its parts, and what it has done."""

    recipe: Recipe
    folder: Path
    world: World
    agent: Agent
    player: Player
    scorer: Scorer
    tracker: Tracker
    recorder: Recorder
    train_tasks: list[Task]
    heldout: list[Task]
    timings: dict[str, float] = field(default_factory=dict)

    async def evaluate(self, name: str, tasks: Sequence[Task], *, samples: int, step: int = 0) -> None:
        """Plays `tasks` with the model as it is; done before is done."""
        if name in read_results(self.folder) or not tasks:
            return
        player = for_evaluation(self.recipe, self.player)
        done = _counter(self.tracker, f"evaluating {name}", len(tasks) * samples)
        began = time.monotonic()
        groups = await player.groups(tasks, samples, label=f"eval/{name}", seed=self.recipe.seed, done=done)
        self.finish(name, groups, step)
        self.timings[f"evaluate {name}"] = time.monotonic() - began

    async def compare(self, name: str, kind: str, tasks: Sequence[Task]) -> None:
        """The same for a policy that is no model."""
        if name in read_results(self.folder) or not tasks:
            return
        done = _counter(self.tracker, f"evaluating {name}", len(tasks))
        groups = await play_policy(self.recipe, self.world, self.agent.scaffold, kind, tasks, done)
        self.finish(name, groups, 0)

    def finish(self, name: str, groups: Sequence[Group], step: int) -> None:
        """Writes an evaluation's episodes and results down, and says what they came to."""
        scores = self.scorer(groups)
        label = name.replace("-", "_")
        for group, own in zip(groups, scores, strict=True):
            self.recorder.write(step, "eval", group, own, label=label)
        results = [result for group, own in zip(groups, scores, strict=True) for result in from_group(group, own)]
        write_results(self.folder, name, results)
        self.tracker.say(f"{name}: {_rates(results)}")


async def _train(
    recipe: Recipe,
    folder: Path,
    fresh: bool,
    overfit: str | None,
    env: Callable[..., Env] | None,
    reward: Callable[..., Any] | None,
) -> dict[str, Any]:
    train_tasks, heldout = _tasks(recipe, overfit)
    scorer = make_scorer(recipe, reward)
    objective = make_objective(recipe, Sampling(temperature=recipe.sampling.temperature))
    estimator = bind("credit", recipe.credit, given=("groups", "scores", "aux", "state"))
    resumed = open_run(folder, recipe, fresh=fresh)
    async with AsyncExitStack() as stack:
        tracker = make_trackers(recipe, folder)
        stack.callback(tracker.close)
        world = make_world(recipe, env)
        stack.push_async_callback(world.close)
        agent = make_agent(recipe)
        run = _Run(
            recipe=recipe,
            folder=folder,
            world=world,
            agent=agent,
            player=make_player(recipe, world, agent.scaffold, agent.engine, agent.context),
            scorer=scorer,
            tracker=tracker,
            recorder=Recorder(folder),
            train_tasks=train_tasks,
            heldout=heldout,
        )
        learner = make_learner(recipe, agent)
        sampler = TaskSampler(train_tasks, seed=recipe.seed)
        alarms = standard_alarms()
        progress = Progress()
        found, complaints = checkpoint.latest(folder / "checkpoints")
        for line in complaints:
            tracker.say(line, level="warning")

        def save(now: Progress) -> None:
            state = {
                "credit": dict(now.credit),
                "sampler": sampler.state(),
                "alarms": {name: alarm.state() for name, alarm in alarms.items()},
            }
            checkpoint.save(folder / "checkpoints", now.step, learner, agent.tokenizer, state, recipe.train.keep)

        if found is None:
            tracker.resume_at(0)
            await _before(run, learner)
            save(progress)
        else:
            checkpoint.restore(found, learner)
            agent.engine.publish(found.step)
            progress = Progress(step=found.step, credit=found.state["credit"])
            sampler.restore(found.state["sampler"])
            for name, alarm in alarms.items():
                alarm.restore(found.state["alarms"][name])
            tracker.resume_at(found.step)
            run.recorder.resume_at(found.step)
            tracker.say(f"going on after step {found.step} of {recipe.train.steps}")
        if resumed and found is None:
            tracker.say("the run had no checkpoint yet; starting from the model")

        await run.evaluate(WARM, heldout, samples=recipe.eval.samples)
        parts = Parts(
            player=run.player,
            sampler=sampler,
            scorer=scorer,
            estimator=estimator,
            learner=learner,
            objective=objective,
            engine=agent.engine,
            tracker=tracker,
            recorder=run.recorder,
            alarms=alarms,
            evaluate=lambda step: run.evaluate(f"step-{step:04d}", heldout, samples=recipe.eval.samples, step=step),
            checkpoint=save,
        )
        began = time.monotonic()
        progress = await train_loop(parts, _settings(recipe), progress)
        run.timings["reinforcement learning"] = time.monotonic() - began
        await run.evaluate(FINAL, heldout, samples=recipe.eval.samples, step=progress.step)
        path = report(folder, recipe, train_tasks, run.timings)
        tracker.say(f"report: {path}")
    return {"results": read_results(folder), "report": path, "run": folder, "step": progress.step}


async def _before(run: _Run, learner: Learner) -> None:
    """What comes before the first RL step: the baselines, then the warm start."""
    recipe = run.recipe
    for name, kind in recipe.eval.policies.items():
        await run.compare(name, kind, run.heldout)
    few = recipe.eval.baseline_tasks or len(run.heldout)
    await run.evaluate(UNTOUCHED, run.heldout[:few], samples=1)
    if not recipe.warmstart.demos:
        return
    began = time.monotonic()
    done = _counter(run.tracker, "playing demonstrations", recipe.warmstart.demos)
    demos = await demonstrate(recipe, run.world, run.agent.scaffold, run.train_tasks, done)
    scores = run.scorer(demos)
    for group, own in zip(demos, scores, strict=True):
        run.recorder.write(0, "warmstart", group, own)
    run.timings["demonstrations"] = time.monotonic() - began
    _learn_demos(run, learner, [group.trajectories[0] for group in demos])
    run.timings["warm start"] = time.monotonic() - began - run.timings["demonstrations"]


def _learn_demos(run: _Run, learner: Learner, demos: Sequence[Trajectory]) -> None:
    """The supervised warm start, with an optimiser of its own so that RL begins with fresh moments."""
    warm = run.recipe.warmstart
    rows = demo_rows(demos, functools.partial(_key_weights, weight=warm.key_weight))
    steps = warm.epochs * -(-len(rows) // warm.batch)
    plan = Plan(
        lr=warm.lr,
        schedule=bind("schedule", Kind(kind="linear")),
        warmup=warm.warmup,
        total=steps,
        clip=run.recipe.train.clip,
        budget=run.recipe.train.budget,
    )
    objective = Objective(loss=bind("loss", Kind(kind="sft")), weigh=bind("weights", Kind(kind="token")))

    def say(done: int, total: int, metrics: dict[str, float]) -> None:
        run.tracker.progress("warm start", done, total)
        if done % max(1, total // 5) == 0:
            run.tracker.say(f"warm start {done}/{total}: loss {metrics['loss/total']:.3f}")

    warm_start(
        Learner(run.agent.model, learner.parameters, plan),
        rows,
        objective,
        epochs=warm.epochs,
        batch=warm.batch,
        seed=run.recipe.seed,
        report=say,
    )
    run.agent.engine.publish(0)


def _key_weights(demo: Trajectory, turn: int, *, weight: float) -> F32:
    """1 for every token, `weight` for the first of a turn: it decides which action is taken."""
    weights = np.ones(len(demo.turns[turn].completion.token_ids), np.float32)
    weights[:1] = weight
    return weights


def _tasks(recipe: Recipe, overfit: str | None) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks; the two never share a task, unless one is to be overfitted."""
    train_tasks = read_tasks(recipe, "train", recipe.tasks.limit)
    if overfit is not None:
        one = [task for task in train_tasks if task.id == overfit]
        if not one:
            raise ConfigError(f"--overfit {overfit!r}: no such training task; turnstile tasks list shows them")
        return one, one
    heldout = read_tasks(recipe, "heldout", recipe.eval.tasks) if recipe.tasks.heldout else []
    if both := overlap(train_tasks, heldout):
        raise ConfigError(f"{len(both)} tasks are both trained on and held out, for example {both[0]!r}")
    return train_tasks, heldout


def _settings(recipe: Recipe) -> Settings:
    train = recipe.train
    return Settings(
        steps=train.steps,
        groups=train.groups,
        attempts=train.attempts,
        seed=recipe.seed,
        epochs=train.epochs,
        minibatches=train.minibatches,
        drop_flat=train.drop_flat_groups,
        checkpoint_every=train.checkpoint_every,
        evaluate_every=recipe.eval.every,
    )


def _counter(tracker: Tracker, label: str, total: int) -> Callable[[Trajectory], None]:
    done = 0
    tracker.progress(label, 0, total)

    def count(_: Trajectory) -> None:
        nonlocal done
        done += 1
        tracker.progress(label, done, total)

    return count


def _rates(results: Sequence[EpisodeResult]) -> str:
    counted = [result for result in results if result.outcome is not None]
    if not counted:
        return f"{len(results)} episodes, none with a verdict"
    shares = (
        f"{name} {float(np.mean([getattr(result, name) for result in counted])):.3f}"
        for name in ("completion", "modification", "resolution")
    )
    return f"{', '.join(shares)} ({len(counted)} episodes)"


def peak_memory_mb() -> float:
    """The most this process and its largest child held at once."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1024


