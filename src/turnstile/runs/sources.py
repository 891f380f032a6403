"""The sources of a run's groups, and the engines that sample them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from turnstile.config import Recipe
from turnstile.engines.remote.router import Router
from turnstile.envs.base import Env
from turnstile.rollout.async_source import AsyncSource
from turnstile.rollout.source import GroupSource, ReplaySource, SyncSource
from turnstile.rollout.workers import GRACE_SECONDS, LOG, SHORT_GRACE_SECONDS, Worker
from turnstile.runs.checkpoint_state import CheckpointState
from turnstile.runs.session import PublishingEngine, RunContext
from turnstile.runs.worker import Setup
from turnstile.trainer.publish import WeightFiles, WeightFolders
from turnstile.wiring.agent import Agent
from turnstile.wiring.servers import ServedWeights, make_remote

WEIGHTS = "weights"
"""The subfolder of a run for weights that other processes load."""


@asynccontextmanager
async def group_source(
    run: RunContext, kept: CheckpointState, env: Callable[..., Env] | None, replay: Path | None
) -> AsyncIterator[GroupSource]:
    """Yield the source of groups: a record, this process alternating with training, or a worker that plays ahead.

    The worker process is ended when the context exits.
    """
    recipe, rollout = run.recipe, run.recipe.rollout
    if replay is not None:
        yield ReplaySource(run=replay, records=run.records, sampler=kept.sampler, groups=rollout.tasks_per_step)
        return

    def say(line: str) -> None:
        run.tracker.say(line)

    if not rollout.max_staleness:
        yield SyncSource(
            player=run.player,
            records=run.records,
            sampler=kept.sampler,
            engine=run.engine,
            groups=rollout.tasks_per_step,
            attempts=rollout.group_size,
            seed=recipe.seed,
            say=say,
        )
        return
    files = _files(run, kept)
    forgiving = rollout.model_copy(update={"max_failures": run.player.failures.limit})
    setup = Setup(recipe=recipe.model_copy(update={"rollout": forgiving}), env=env)
    source = AsyncSource(
        start=lambda on_message: Worker(setup, log=run.folder / LOG, on_message=on_message),
        write=files.write,
        engine=run.engine,
        records=run.records,
        sampler=kept.sampler,
        groups=rollout.tasks_per_step,
        attempts=rollout.group_size,
        seed=recipe.seed,
        max_staleness=rollout.max_staleness,
        last=recipe.train.steps,
        graders=tuple(run.world.graders.values()),
        hint=run.player.hint,
        say=say,
        board=run.world.board,
    )
    kept.tasks_at = source.state
    grace = SHORT_GRACE_SECONDS
    try:
        yield source
        grace = GRACE_SECONDS
    finally:
        await source.close(grace=grace)
        files.remove()


def _files(run: RunContext, kept: CheckpointState) -> WeightFiles | WeightFolders:
    """Return where the worker gets its weights: files for its own model, or folders for servers."""
    if run.recipe.engine.in_process:
        return WeightFiles(run.folder / WEIGHTS, kept.learner)
    return WeightFolders(run.folder / WEIGHTS, run.agent.model, run.agent.tokenizer)


@asynccontextmanager
async def sampler(
    recipe: Recipe, folder: Path, agent: Agent, *, replay: bool
) -> AsyncIterator[tuple[PublishingEngine, int]]:
    """Yield the engine that this process samples with, and how many tokens its context can hold.

    It is the agent's own engine if that samples, if a worker plays ahead, or in a replay. Otherwise it is the recipe's
    servers, which are first given the agent's weights.
    """
    if recipe.engine.in_process or recipe.rollout.max_staleness or replay:
        yield agent.engine, agent.context
        return
    remote = await make_remote(recipe, agent.scaffold, training=True)
    assert isinstance(remote.engine, Router)
    files = WeightFolders(folder / WEIGHTS, agent.model, agent.tokenizer, kept=1)
    try:
        given = ServedWeights(recipe, remote.engine, files.write)
        given.publish(0)
        yield given, min(agent.context, remote.context)
    finally:
        await remote.close()
        files.remove()
