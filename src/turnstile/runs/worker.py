"""The process that plays episodes ahead of training: `python -m turnstile.runs.worker DESCRIPTOR`.

It makes its own model, engine and environments from the recipe, plays the requested episodes and reports each one as it
ends. When its pipe closes, training has ended or died, so it releases everything and ends. It also ends on SIGTERM or
SIGINT, in which case training starts another worker.
"""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from turnstile.config import Recipe
from turnstile.engines.remote.router import Router
from turnstile.envs.base import Env
from turnstile.models.load import load_tokenizer
from turnstile.rollout.episode import Attempt
from turnstile.rollout.group import EpisodeCallback, Player
from turnstile.rollout.pipe import Pipe
from turnstile.rollout.workers import (
    GRACE_SECONDS,
    AttemptEnded,
    AttemptStarted,
    PlayJobs,
    StatusCounts,
    TurnReached,
    WeightUpdate,
    WorkerFault,
    pickling_error,
)
from turnstile.runs.session import PublishingEngine
from turnstile.tracking.board import EpisodeStatus
from turnstile.types import Trajectory, Turn
from turnstile.wiring.agent import make_agent, make_player, make_scaffold
from turnstile.wiring.learning import trainable
from turnstile.wiring.servers import Remote, ServedWeights, make_remote
from turnstile.wiring.world import make_world

EVERY = 0.5
"""Seconds between two checks of the episodes' statuses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What this process needs to make its parts. `env`, if given, replaces the recipe's environment."""

    recipe: Recipe
    env: Callable[..., Env] | None = None


class Model:
    """An engine with a copy of the model in this process."""

    def __init__(self, recipe: Recipe) -> None:
        self._agent = make_agent(recipe)
        trainable(recipe, self._agent)  # adds the adapters of a run that trains them
        self.engine: PublishingEngine = self._agent.engine
        self.scaffold, self.context = self._agent.scaffold, self._agent.context

    async def load(self, weights: WeightUpdate) -> None:
        """Load a file of weights. Raises FileNotFoundError if newer weights have replaced the file."""
        await self._agent.engine.update(functools.partial(load, self._agent.model, weights))

    async def close(self) -> None:
        pass


class Servers:
    """An engine on servers, which load folders of weights themselves, so this process has no model."""

    def __init__(self, recipe: Recipe, remote: Remote) -> None:
        assert isinstance(remote.engine, Router)
        self._remote = remote
        self._given = ServedWeights(recipe, remote.engine, _no_write)
        self.engine: PublishingEngine = self._given
        self.scaffold, self.context = remote.scaffold, remote.context

    async def load(self, weights: WeightUpdate) -> None:
        """Make the servers load a folder of weights, with which all further tokens are sampled."""
        self._given.hand_out(weights.version, weights.file)

    async def close(self) -> None:
        await self._remote.close()


async def speaker(recipe: Recipe) -> Model | Servers:
    """Return the model or the servers that play a recipe's episodes for this process."""
    if recipe.engine.in_process:
        return Model(recipe)
    scaffold = make_scaffold(recipe, load_tokenizer(recipe.model.id))
    return Servers(recipe, await make_remote(recipe, scaffold, training=True))


def _no_write(version: int) -> Path:
    raise AssertionError("weights come from training")


async def serve(pipe: Pipe, setup: Setup) -> None:
    """Play episodes until the pipe closes. Raises the first error of an episode that is not tolerated."""
    world = make_world(setup.recipe, setup.env)
    try:
        own = await speaker(setup.recipe)
        try:
            await _MessageHandler(
                pipe, own, make_player(setup.recipe, world, own.scaffold, own.engine, own.context)
            ).work()
        finally:
            await own.close()
    finally:
        await world.close()


class _MessageHandler:
    """Receives messages and carries them out concurrently."""

    def __init__(self, pipe: Pipe, own: Model | Servers, player: Player) -> None:
        self._pipe = pipe
        self._own = own
        self._newest: WeightUpdate | None = None
        self._came = asyncio.Event()
        self._player = replace(player, deterministic=False, slots=asyncio.Semaphore(player.concurrent))

    async def work(self) -> None:
        loading: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            doing = {tasks.create_task(self._send_status_counts())}
            while (message := await self._pipe.receive()) is not None:
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, WeightUpdate):
                    self._newest = message
                    self._came.set()
                    task = loading = tasks.create_task(self._load(loading))
                else:
                    assert isinstance(message, PlayJobs)
                    task = tasks.create_task(self._play(message, loading))
                doing.add(task)
                task.add_done_callback(doing.discard)
            for task in doing:
                task.cancel()

    async def _load(self, before: asyncio.Task[None] | None) -> None:
        """Load the newest weights.

        Training keeps only the latest files. If one is gone, newer weights are on their way, so this waits for them,
        and nothing is sampled before they are loaded.
        """
        if before is not None:
            await before
        while True:
            self._came.clear()
            weights = self._newest
            assert weights is not None
            try:
                await self._own.load(weights)
                return
            except FileNotFoundError:
                await self._came.wait()

    async def _play(self, asked: PlayJobs, loading: asyncio.Task[None] | None) -> None:
        if loading is not None:
            await loading  # jobs never use weights older than those when they were requested
        await self._player.play(asked.jobs, callback=_EventSender(self._pipe, self._own.engine))

    async def _send_status_counts(self) -> None:
        """Send the counts of unfinished episodes by status whenever they have changed, checking at intervals."""
        sent: dict[EpisodeStatus, int] = {}
        while True:
            counts = self._player.board.unfinished()
            if counts != sent:
                self._pipe.send(StatusCounts(counts))
                sent = counts
            await asyncio.sleep(EVERY)


class _EventSender(EpisodeCallback):
    """Sends every event of an attempt to training."""

    def __init__(self, pipe: Pipe, engine: PublishingEngine) -> None:
        self._pipe = pipe
        self._engine = engine

    def on_start(self, attempt: Attempt) -> None:
        self._pipe.send(AttemptStarted(attempt))

    def on_turn(self, attempt: Attempt, number: int, turn: Turn) -> None:
        self._pipe.send(TurnReached(attempt, number, turn))

    def on_end(self, trajectory: Trajectory, *, will_retry: bool) -> None:
        self._pipe.send(AttemptEnded(replace(trajectory, turns=()), will_retry, self._engine.take_stats()))


@torch.no_grad()
def load(model: PreTrainedModel, weights: WeightUpdate) -> int:
    """Copy a file's parameters into the model in place, and return their version."""
    parameters = dict(model.named_parameters())
    for name, value in load_file(weights.file).items():
        parameters[name].copy_(value)
    return weights.version


def main(descriptor: int) -> None:
    """Play episodes for the run at the other end of the socket `descriptor`, until it closes or a signal arrives."""
    asyncio.run(_main(descriptor))


async def _main(descriptor: int) -> None:
    pipe = Pipe(socket.socket(fileno=descriptor), on_close=_end_soon)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        pipe.shutdown()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    setup = await pipe.receive()
    if setup is not None:
        await _serve(pipe, setup)
    if received:
        raise SystemExit(128 + received[0])


async def _serve(pipe: Pipe, setup: Setup | Exception) -> None:
    try:
        if isinstance(setup, Exception):
            raise pickling_error(setup)
        await serve(pipe, setup)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        _report(pipe, error)
        raise SystemExit(1) from None


def _end_soon() -> None:
    """Kill this process group after `GRACE_SECONDS`, in case something in it hangs."""

    def end() -> None:
        time.sleep(GRACE_SECONDS)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


def _report(pipe: Pipe, error: BaseException) -> None:
    """Report the error that ended this process to training. Of a group of errors, only the first is reported."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = "".join(traceback.format_exception(error))
    where = f"in the process that plays episodes:\n{text}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error that cannot be pickled is reported as text
        error = RuntimeError(f"{type(error).__name__}: {error}")
    pipe.send(WorkerFault(error, where))
    pipe.finish_sending()


if __name__ == "__main__":
    main(int(sys.argv[1]))
