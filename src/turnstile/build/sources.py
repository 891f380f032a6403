"""Where a run's groups come from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from turnstile.build.kept import Kept
from turnstile.build.session import Run
from turnstile.build.worker import Setup
from turnstile.envs.base import Env
from turnstile.rollout.ahead import Ahead
from turnstile.rollout.source import GroupSource, InTurn, Replay
from turnstile.rollout.workers import HURRY, LOG, PATIENCE, Worker
from turnstile.trainer.publish import WeightFiles


@asynccontextmanager
async def group_source(
    run: Run, kept: Kept, env: Callable[..., Env] | None, replay: Path | None
) -> AsyncIterator[GroupSource]:
    """A record, this process in turn with training, or another process ahead of it, which is ended with this."""
    recipe, engine = run.recipe, run.agent.engine
    train = recipe.train
    if replay is not None:
        yield Replay(run=replay, books=run.books, sampler=kept.sampler, groups=train.groups)
        return

    def say(line: str) -> None:
        run.tracker.say(line)

    if not recipe.rollout.ahead:
        yield InTurn(
            player=run.player,
            books=run.books,
            sampler=kept.sampler,
            engine=engine,
            groups=train.groups,
            attempts=train.attempts,
            seed=recipe.seed,
            say=say,
        )
        return
    files = WeightFiles(run.folder / "weights", kept.learner)
    source = Ahead(
        start=lambda hear: Worker(Setup(recipe=recipe, env=env), log=run.folder / LOG, hear=hear),
        write=files.write,
        engine=engine,
        books=run.books,
        sampler=kept.sampler,
        groups=train.groups,
        attempts=train.attempts,
        seed=recipe.seed,
        ahead=recipe.rollout.ahead,
        last=train.steps,
        examiners=tuple(run.world.examiners.values()),
        say=say,
        board=run.world.board,
    )
    kept.tasks_at = source.state
    patience = HURRY
    try:
        yield source
        patience = PATIENCE
    finally:
        await source.close(patience=patience)
        files.remove()
