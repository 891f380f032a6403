"""The process that plays episodes ahead of training: `python -m turnstile.build.worker DESCRIPTOR`.

It makes its own model, engine and environments from the recipe, plays what it is asked for and tells each episode as
it ends. When its end of the line closes, training is gone or done: it puts everything away and ends. SIGTERM and SIGINT
that are sent to it itself have it do the same, and training starts another.
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

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from turnstile.build.parts import Agent, make_agent, make_player, make_world, trainable
from turnstile.config import Recipe
from turnstile.envs.base import Env
from turnstile.rollout.episode import Attempt
from turnstile.rollout.group import Player, Watch
from turnstile.rollout.line import Line
from turnstile.rollout.workers import PATIENCE, Began, Ended, Fault, Play, Stands, Turned, Weights, cannot_be_sent
from turnstile.tracking.board import Place
from turnstile.types import Trajectory, Turn

EVERY = 0.5
"""Seconds between two looks at where the episodes are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What the parts are made of; `env` takes the place of the recipe's."""

    recipe: Recipe
    env: Callable[..., Env] | None = None


async def serve(line: Line, setup: Setup) -> None:
    """Plays until the line closes. A fault in an episode ends it."""
    world = make_world(setup.recipe, setup.env)
    try:
        agent = make_agent(setup.recipe)
        trainable(setup.recipe, agent)  # adds the adapters of a run that trains such
        player = make_player(setup.recipe, world, agent.scaffold, agent.engine, agent.context)
        await _Desk(line, agent, player).work()
    finally:
        await world.close()


class _Desk:
    """Takes the messages in, and has them done side by side."""

    def __init__(self, line: Line, agent: Agent, player: Player) -> None:
        self._line = line
        self._agent = agent
        self._newest: Weights | None = None
        self._came = asyncio.Event()
        self._player = replace(player, deterministic=False, places=asyncio.Semaphore(player.concurrent))

    async def work(self) -> None:
        loading: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            doing = {tasks.create_task(self._stands())}
            while (message := await self._line.receive()) is not None:
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, Weights):
                    self._newest = message
                    self._came.set()
                    task = loading = tasks.create_task(self._load(loading))
                else:
                    assert isinstance(message, Play)
                    task = tasks.create_task(self._play(message, loading))
                doing.add(task)
                task.add_done_callback(doing.discard)
            for task in doing:
                task.cancel()

    async def _load(self, before: asyncio.Task[None] | None) -> None:
        """Loads the newest weights. Training keeps the last files alone: where one is gone, newer ones are on their
        way, and nothing is sampled before those are loaded."""
        if before is not None:
            await before
        while True:
            self._came.clear()
            weights = self._newest
            assert weights is not None
            try:
                await self._agent.engine.update(functools.partial(load, self._agent.model, weights))
                return
            except FileNotFoundError:
                await self._came.wait()

    async def _play(self, asked: Play, loading: asyncio.Task[None] | None) -> None:
        if loading is not None:
            await loading  # nothing is sampled with weights older than those that it was asked for with
        await self._player.play(asked.jobs, watch=_Teller(self._line, self._agent))

    async def _stands(self) -> None:
        """Tells where the episodes are, now and then, when that has changed."""
        told: dict[Place, int] = {}
        while True:
            counts = self._player.board.under_way()
            if counts != told:
                self._line.send(Stands(counts))
                told = counts
            await asyncio.sleep(EVERY)


class _Teller(Watch):
    """Tells training all that happens to an attempt."""

    def __init__(self, line: Line, agent: Agent) -> None:
        self._line = line
        self._agent = agent

    def begins(self, attempt: Attempt) -> None:
        self._line.send(Began(attempt))

    def turned(self, attempt: Attempt, number: int, turn: Turn) -> None:
        self._line.send(Turned(attempt, number, turn))

    def ended(self, trajectory: Trajectory, *, again: bool) -> None:
        self._line.send(Ended(replace(trajectory, turns=()), again, self._agent.engine.take_stats()))


@torch.no_grad()
def load(model: PreTrainedModel, weights: Weights) -> int:
    """The file's parameters into the model, in place."""
    parameters = dict(model.named_parameters())
    for name, value in load_file(weights.file).items():
        parameters[name].copy_(value)
    return weights.version


def main(descriptor: int) -> None:
    asyncio.run(_main(descriptor))


async def _main(descriptor: int) -> None:
    line = Line(socket.socket(fileno=descriptor), at_end=_end_soon)
    told: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        told.append(number)
        line.shut()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    setup = await line.receive()
    if setup is not None:
        await _serve(line, setup)
    if told:
        raise SystemExit(128 + told[0])


async def _serve(line: Line, setup: Setup | Exception) -> None:
    try:
        if isinstance(setup, Exception):
            raise cannot_be_sent(setup)
        await serve(line, setup)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        _report(line, error)
        raise SystemExit(1) from None


def _end_soon() -> None:
    """Nobody is there any more to end this process, should something in it hang."""

    def end() -> None:
        time.sleep(PATIENCE)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


def _report(line: Line, error: BaseException) -> None:
    """Tells training what ended this process: the first fault of those that one brought about."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    told = "".join(traceback.format_exception(error))
    where = f"in the process that plays episodes:\n{told}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # one that does not survive the way is told in words
        error = RuntimeError(f"{type(error).__name__}: {error}")
    line.send(Fault(error, where))
    line.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]))
