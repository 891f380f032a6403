"""`turnstile train`: baselines, warm start, reinforcement learning, evaluation, report; each stage once per run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnstile.config import Recipe
from turnstile.credit.base import GIVEN, Estimator
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.envs.base import Env
from turnstile.errors import ConfigError, ReplayError
from turnstile.records.record import Recorder
from turnstile.rollout.failures import Failures
from turnstile.rollout.source import GroupSource, ReplaySource
from turnstile.runs.checkpoint_state import CheckpointState, check_keep_best, open_run_records
from turnstile.runs.rehearsal import read_rehearsal, rehearsal_objective, store_samples
from turnstile.runs.report import report
from turnstile.runs.run_folder import FINAL, WARM, open_run, read_results, room_for, starting
from turnstile.runs.scripted import check_scripts
from turnstile.runs.session import RunContext
from turnstile.runs.sft import baselines_and_warm_start, learn_recorded, read_talks
from turnstile.runs.sources import group_source, sampler
from turnstile.runs.stopping import Stopping
from turnstile.runs.task_validation import refuse_failed
from turnstile.tasks.conversations.conversation import Conversation
from turnstile.tracking.board import StatusBoard
from turnstile.trainer import rng
from turnstile.trainer.activation_cache import RolloutActivations
from turnstile.trainer.learner import Learner, Objective
from turnstile.trainer.loop import LoopState, Settings, TrainingParts
from turnstile.trainer.loop import train as train_loop
from turnstile.types import Task
from turnstile.wiring.agent import check_kinds, check_models, make_agent, make_player
from turnstile.wiring.graders import check_asked, check_graders, make_graders
from turnstile.wiring.group_size import check_company
from turnstile.wiring.kinds import bind
from turnstile.wiring.learning import make_learner, make_logprob_providers, make_objective
from turnstile.wiring.recipe_check import check_recipe
from turnstile.wiring.tasks import overlap, read_tasks
from turnstile.wiring.world import World, make_scorer, make_trackers, make_world


def train(
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
    """Runs a recipe in the folder `run`, going on where an earlier call stopped.

    `overfit` trains and evaluates on that one task. `env` and `reward` take the place of the recipe's: any
    callable that makes an environment, any function `(task, trajectory) -> float`; `tasks` and `heldout` that of
    its task files. `replay` is a run of the same recipe that is trained again from its record, without an environment
    and without evaluations. `plain` has the console print lines and draw nothing. With `strict` the first fault in an
    environment's code ends the run, whatever `rollout.max_failures`. Returns the run's summary: `results` (evaluation
    name -> list of EpisodeResult), `report` (path), `run`, `step`.
    """
    check_recipe(recipe, env=env is not None)
    pair = _tasks(recipe, overfit, tasks, heldout)
    refuse_failed(recipe, *pair)
    check_kinds(recipe, env)
    check_graders(recipe)
    if replay is not None:
        pair = (pair[0], [])  # nothing is played, so nothing is evaluated
    else:
        check_asked(recipe, train=pair[0], heldout=pair[1])
    parts = {"overfit": overfit, "reward": reward, "replay": replay}
    given = {name: getattr(part, "__qualname__", str(part)) for name, part in parts.items() if part is not None}
    stopping = Stopping()
    with room_for(run):
        return stopping.run(_train(recipe, run, fresh, given, pair, env, reward, replay, plain, strict, stopping))


async def _train(
    recipe: Recipe,
    folder: Path,
    fresh: bool,
    given: dict[str, str],
    tasks: tuple[list[Task], list[Task]],
    env: Callable[..., Env] | None,
    reward: Callable[..., Any] | None,
    replay: Path | None,
    plain: bool,
    strict: bool,
    stopping: Stopping,
) -> dict[str, Any]:
    """Everything a recipe can get wrong is found before the model is loaded."""
    train_tasks, heldout = tasks
    scorer = make_scorer(recipe, reward)
    objective = make_objective(recipe)
    rehearsal_objective(recipe)
    estimator = bind("credit", recipe.credit, given=GIVEN)
    check_company(recipe, estimator)
    check_scripts(recipe)
    check_keep_best(recipe, env)
    talks = read_talks(recipe)
    check_models(recipe)
    async with AsyncExitStack() as stack:
        begin = stack.enter_context(starting(folder))
        open_run(folder, recipe, fresh=fresh, given=given)
        records = open_run_records(folder)
        stack.callback(records.close)
        board = StatusBoard()
        tracker = make_trackers(recipe, folder, board=board, plain=plain)
        stack.callback(tracker.close)
        world = World(make_env=_no_env) if replay else make_world(recipe, env, board=board)
        stack.push_async_callback(world.close)
        rng.seed(recipe.seed)
        agent = make_agent(recipe)
        graders = {} if replay else make_graders(recipe, folder, agent)
        for grader in graders.values():
            stack.push_async_callback(grader.close)
        world = replace(world, graders=graders)
        engine, context = await stack.enter_async_context(sampler(recipe, folder, agent, replay=replay is not None))
        player = make_player(recipe, world, agent.scaffold, engine, context)
        run = RunContext(
            recipe=recipe,
            folder=folder,
            world=world,
            agent=agent,
            engine=engine,
            player=replace(player, failures=Failures()) if strict else player,
            scorer=scorer,
            tracker=tracker,
            recorder=Recorder(folder),
            records=records,
            train_tasks=train_tasks,
            heldout=heldout,
        )
        kept = CheckpointState(run, make_learner(recipe, agent), estimator)
        begin()
        if not kept.restore():
            await _begin(run, kept, talks, replay)
        samples = recipe.eval.samples
        if recipe.eval.before and recipe.sft.wanted:
            await run.evaluate(WARM, heldout, samples=samples)
        with run.timed("reinforcement learning"):
            source = await stack.enter_async_context(group_source(run, kept, env, replay))
            progress = await _learn(kept, _parts(run, kept, source, estimator, objective), stopping)
        if progress.step:
            await run.evaluate(FINAL, heldout, samples=samples, step=progress.step)
        path = report(folder, recipe, train_tasks)
        tracker.say(f"report: {path}")
    return {"results": read_results(folder), "report": path, "run": folder, "step": progress.step}


async def _begin(run: RunContext, kept: CheckpointState, talks: Sequence[Conversation], replay: Path | None) -> None:
    """All that comes before the first step, and a checkpoint of it."""
    run.tracker.resume_at(0)
    run.recorder.resume_at(0)
    if replay is None:
        await baselines_and_warm_start(run, kept.learner, talks)
    else:
        learn_recorded(run, kept.learner, replay)
    await store_samples(run, replay)
    kept.begin()
    kept.save(kept.progress, {})


async def _learn(kept: CheckpointState, parts: TrainingParts, stopping: Stopping) -> LoopState:
    """Reinforcement learning, to its end or to a checkpoint where it was stopped."""
    stopping.save = kept.save_if_new
    try:
        progress = await train_loop(parts, _settings(kept.run.recipe), kept.progress)
    except asyncio.CancelledError:
        with stopping.saving():
            kept.save_if_new()
        raise
    stopping.save = None
    return progress


def _no_env() -> Env:
    raise ReplayError("a replay plays no episode")


def _parts(
    run: RunContext, kept: CheckpointState, source: GroupSource, estimator: Estimator, objective: Objective
) -> TrainingParts:
    async def evaluate(step: int) -> None:
        await run.evaluate(f"step-{step:04d}", run.heldout, samples=run.recipe.eval.samples, step=step)

    return TrainingParts(
        source=source,
        scorer=run.scorer,
        estimator=estimator,
        learner=kept.learner,
        objective=objective,
        rollout_activations=None if isinstance(source, ReplaySource) else _rollout_activations(run, kept.learner),
        logprob_providers=make_logprob_providers(
            run.recipe,
            objective,
            kept.learner,
            run.folder,
            renderer=run.agent.scaffold.renderer,
            step=kept.progress.step,
        ),
        auxiliary=kept.learned,
        rehearsal=read_rehearsal(run),
        buffer=kept.buffer,
        tracker=run.tracker,
        recorder=run.recorder,
        run_records=run.records,
        alarms=kept.alarms,
        evaluate=evaluate,
        checkpoint=kept.save,
    )


def _rollout_activations(run: RunContext, learner: Learner) -> RolloutActivations | None:
    """Lets the engine keep what the frozen layers gave. Not where another engine samples, nor where a run must repeat
    bit by bit: the engine computes tokens in other company than the trainer does, which shows in the last bit."""
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
    """Training and held-out tasks; the two never share a task, unless one is to be overfitted."""
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
