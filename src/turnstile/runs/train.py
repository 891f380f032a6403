"""`turnstile train`: baselines, warm start, reinforcement learning, evaluation and report, each done once per run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnstile.config import Recipe
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.envs.base import Env
from turnstile.errors import ConfigError, ReplayError
from turnstile.records.record import Recorder
from turnstile.rollout.failures import Failures
from turnstile.rollout.source import GroupSource, ReplaySource
from turnstile.runs.checkpoint_state import CheckpointState, open_run_records
from turnstile.runs.checks import CheckedParts, check_parts
from turnstile.runs.rehearsal import read_rehearsal, store_samples
from turnstile.runs.report import report
from turnstile.runs.run_folder import FINAL, WARM, open_run, read_results, room_for, starting
from turnstile.runs.session import RunContext
from turnstile.runs.sft import baselines_and_warm_start, learn_recorded
from turnstile.runs.sources import group_source, sampler
from turnstile.runs.stopping import Stopping
from turnstile.tasks.conversations.conversation import Conversation
from turnstile.tracking.board import StatusBoard
from turnstile.trainer import rng
from turnstile.trainer.activation_cache import RolloutActivations
from turnstile.trainer.learner import Learner
from turnstile.trainer.loop import LoopState, Settings, TrainingParts
from turnstile.trainer.loop import train as train_loop
from turnstile.types import Task
from turnstile.wiring.agent import make_agent, make_player
from turnstile.wiring.graders import make_graders
from turnstile.wiring.learning import make_learner, make_logprob_providers
from turnstile.wiring.recipe_check import check_recipe
from turnstile.wiring.tasks import overlap, read_tasks
from turnstile.wiring.world import World, make_trackers, make_world


def train(  # noqa: PLR0913 - the ways in which a caller may change a run, each by name
    recipe: Recipe,
    *,
    run: Path,
    fresh: bool = False,
    overfit: str | None = None,
    env: Callable[..., Env] | None = None,
    reward: Callable[..., Any] | None = None,
    tasks: Sequence[Task] | None = None,
    heldout: Sequence[Task] | None = None,
    replay: Path | None = None,
    plain: bool = False,
    strict: bool = False,
) -> dict[str, Any]:
    """Run a recipe in the folder `run`, continuing an earlier run there.

    `overfit` names the only task to train and evaluate on. `env` (any callable that makes an environment) and `reward`
    (any function `(task, trajectory) -> float`) replace the recipe's, and `tasks` and `heldout` replace its task files.
    `replay` is a run of the same recipe; training is repeated from its record, without an environment and without
    evaluations. With `plain` the console prints only lines. With `strict` the first error in an environment's code ends
    the run, regardless of `rollout.max_failures`. Returns the run's summary: `results` (evaluation name -> list of
    EpisodeResult), `report` (path), `run`, `step`.
    """
    check_recipe(recipe, env=env is not None)
    train_tasks, heldout = _tasks(recipe, overfit, tasks, heldout)
    parts = check_parts(recipe, train_tasks, heldout, env=env, reward=reward, plays=replay is None)
    named = {"overfit": overfit, "reward": reward, "replay": replay}
    start = _Start(
        recipe=recipe,
        folder=run,
        train_tasks=train_tasks,
        heldout=[] if replay else heldout,  # a replay plays nothing, so it evaluates nothing
        env=env,
        replay=replay,
        fresh=fresh,
        plain=plain,
        strict=strict,
        given={name: getattr(part, "__qualname__", str(part)) for name, part in named.items() if part is not None},
    )
    stopping = Stopping()
    with room_for(run):
        return stopping.run(_train(start, parts, stopping))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """A recipe and everything that the caller gave with it. `given` describes the latter in the run's folder."""

    recipe: Recipe
    folder: Path
    train_tasks: list[Task]
    heldout: list[Task]
    env: Callable[..., Env] | None
    replay: Path | None
    fresh: bool
    plain: bool
    strict: bool
    given: dict[str, str]


async def _train(start: _Start, parts: CheckedParts, stopping: Stopping) -> dict[str, Any]:
    recipe = start.recipe
    async with AsyncExitStack() as stack:
        begin = stack.enter_context(starting(start.folder))
        run = await _open(start, parts, stack)
        state = CheckpointState(run, make_learner(recipe, run.agent), parts.estimator)
        begin()
        if not state.restore():
            await _begin(run, state, parts.conversations, start.replay)
        samples = recipe.eval.samples
        if recipe.eval.before and recipe.sft.wanted:
            await run.evaluate(WARM, run.heldout, samples=samples)
        with run.timed("reinforcement learning"):
            source = await stack.enter_async_context(group_source(run, state, start.env, start.replay))
            progress = await _learn(state, _training_parts(run, state, source, parts), stopping)
        if progress.step:
            await run.evaluate(FINAL, run.heldout, samples=samples, step=progress.step)
        path = report(start.folder, recipe, run.train_tasks, start.env)
        run.tracker.say(f"report: {path}")
    return {"results": read_results(start.folder), "report": path, "run": start.folder, "step": progress.step}


async def _open(start: _Start, parts: CheckedParts, stack: AsyncExitStack) -> RunContext:
    """Open the run's folder, load its model, and make the parts that play its episodes. `stack` closes them."""
    recipe, folder, replay = start.recipe, start.folder, start.replay
    open_run(folder, recipe, fresh=start.fresh, given=start.given)
    records = open_run_records(folder)
    stack.callback(records.close)
    board = StatusBoard()
    tracker = make_trackers(recipe, folder, board=board, plain=start.plain)
    stack.callback(tracker.close)
    world = World(make_env=_no_env) if replay else make_world(recipe, start.env, board=board)
    stack.push_async_callback(world.close)
    rng.seed(recipe.seed)
    agent = make_agent(recipe)
    graders = {} if replay else make_graders(recipe, folder, agent)
    for grader in graders.values():
        stack.push_async_callback(grader.close)
    world = replace(world, graders=graders)
    engine, context = await stack.enter_async_context(sampler(recipe, folder, agent, replay=replay is not None))
    player = make_player(recipe, world, agent.scaffold, engine, context)
    return RunContext(
        recipe=recipe,
        folder=folder,
        world=world,
        agent=agent,
        engine=engine,
        player=replace(player, failures=Failures()) if start.strict else player,
        scorer=parts.scorer,
        tracker=tracker,
        recorder=Recorder(folder),
        records=records,
        train_tasks=start.train_tasks,
        heldout=start.heldout,
    )


async def _begin(
    run: RunContext, state: CheckpointState, conversations: Sequence[Conversation], replay: Path | None
) -> None:
    """Do everything that precedes the first step, and save a checkpoint."""
    run.tracker.resume_at(0)
    run.recorder.resume_at(0)
    if replay is None:
        await baselines_and_warm_start(run, state.learner, conversations)
    else:
        learn_recorded(run, state.learner, replay)
    await store_samples(run, replay)
    state.begin()
    state.save(state.progress, {})


async def _learn(state: CheckpointState, parts: TrainingParts, stopping: Stopping) -> LoopState:
    """Train by RL to the last step, or until the run is stopped; then save a checkpoint."""
    stopping.save = state.save_if_new
    try:
        progress = await train_loop(parts, _settings(state.run.recipe), state.progress)
    except asyncio.CancelledError:
        with stopping.saving():
            state.save_if_new()
        raise
    stopping.save = None
    return progress


def _no_env() -> Env:
    raise ReplayError("a replay plays no episode")


def _training_parts(run: RunContext, state: CheckpointState, source: GroupSource, parts: CheckedParts) -> TrainingParts:
    async def evaluate(step: int) -> None:
        await run.evaluate(f"step-{step:04d}", run.heldout, samples=run.recipe.eval.samples, step=step)

    return TrainingParts(
        source=source,
        scorer=run.scorer,
        estimator=parts.estimator,
        learner=state.learner,
        objective=parts.objective,
        rollout_activations=None
        if isinstance(source, ReplaySource)
        else _enable_rollout_activations(run, state.learner),
        logprob_providers=make_logprob_providers(
            run.recipe,
            parts.objective,
            state.learner,
            run.folder,
            renderer=run.agent.scaffold.renderer,
            step=state.progress.step,
        ),
        auxiliary=state.learned,
        rehearsal=read_rehearsal(run),
        buffer=state.buffer,
        tracker=run.tracker,
        recorder=run.recorder,
        run_records=run.records,
        alarms=state.alarms,
        evaluate=evaluate,
        checkpoint=state.save,
    )


def _enable_rollout_activations(run: RunContext, learner: Learner) -> RolloutActivations | None:
    """Make the engine keep the frozen layers' output, and return a function that looks it up, or None.

    It is None if another engine samples, or if the run must be bitwise reproducible, since the engine's batches differ
    from the trainer's, which changes the last bit.
    """
    engine, recipe = run.engine, run.recipe
    if not isinstance(engine, TransformersEngine) or recipe.rollout.max_staleness:
        return None
    if recipe.engine.deterministic or not learner.frozen:
        return None
    engine.keep_activations(learner.frozen)
    return lambda row: engine.activations(row.origin[0], row.token_ids)


def _settings(recipe: Recipe) -> Settings:
    train = recipe.train
    return Settings(
        steps=train.steps,
        epochs=train.epochs,
        minibatches=train.minibatches,
        drop_zero_advantage=train.drop_zero_advantage_groups,
        checkpoint_every=train.checkpoint_every,
        evaluate_every=recipe.eval.every,
    )


def _tasks(
    recipe: Recipe, overfit: str | None, tasks: Sequence[Task] | None, heldout: Sequence[Task] | None
) -> tuple[list[Task], list[Task]]:
    """Return training and held-out tasks. They share no task, except with `overfit`."""
    train_tasks = read_tasks(recipe, "train", recipe.tasks.limit) if tasks is None else list(tasks)
    if overfit is not None:
        one = [task for task in train_tasks if task.id == overfit]
        if not one:
            raise ConfigError(f"--overfit {overfit!r}: no such training task; turnstile tasks list shows them")
        return one, one
    if heldout is None:
        heldout = read_tasks(recipe, "heldout", recipe.eval.tasks) if recipe.tasks.heldout else []
    if both := overlap(train_tasks, heldout):
        raise ConfigError(f"{len(both)} tasks are both trained on and held out, for example {both[0]!r}")
    return train_tasks, list(heldout)
