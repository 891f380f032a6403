"""Environments with which the process that plays ahead ends, and no other. `PLAYED_AHEAD` names a file that is made the
first time, for what happens once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from turnstile.envs.base import Step
from turnstile.envs.guess import GuessEnv
from turnstile.rollout.workers import MODULE
from turnstile.types import Message

ONCE = "PLAYED_AHEAD"


def ahead() -> bool:
    """Whether this is the process that plays ahead."""
    return MODULE in sys.orig_argv


def first_time() -> bool:
    mark = Path(os.environ[ONCE])
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Deadly(GuessEnv):
    """Kills its process."""

    async def step(self, message: Message) -> Step:
        if ahead() and first_time():
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(message)


class Slow(GuessEnv):
    """Takes its time, so that somebody may see it at it."""

    async def step(self, message: Message) -> Step:
        await asyncio.sleep(0.2)
        return await super().step(message)


class ToldToEnd(GuessEnv):
    """Has its process told to end, and says something before."""

    number = signal.SIGTERM

    async def step(self, message: Message) -> Step:
        if ahead() and first_time():
            print("a tool's complaint", file=sys.stderr)
            os.kill(os.getpid(), self.number)
        return await super().step(message)


class Interrupted(ToldToEnd):
    number = signal.SIGINT


class AlwaysDeadly(GuessEnv):
    async def step(self, message: Message) -> Step:
        if ahead():
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(message)


class Faulty(GuessEnv):
    """Has a fault, which is not a failure of the machine."""

    async def step(self, message: Message) -> Step:
        if ahead():
            raise KeyError("no such tool")
        return await super().step(message)


def no_env() -> GuessEnv:
    raise LookupError("no such environment")
