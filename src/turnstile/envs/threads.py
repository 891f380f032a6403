"""Environments whose methods are plain functions: each call goes to a thread of a bounded pool, so that one that works
or waits holds up nobody else's episode."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from turnstile.envs.base import Env, Rates, Start, Step
from turnstile.errors import SandboxError
from turnstile.types import JSON, Message, Task

METHODS = ("reset", "step", "measure", "close")
GRACE = 30.0
"""Seconds that a call may go on after its episode's time was up, before the episode is given up."""


class Threads:
    """At most `workers` calls of plain methods at once, over all episodes; further ones wait their turn."""

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="environment")

    def around(self, make: Callable[[], Any]) -> Callable[[], Env]:
        """A maker of environments that may be awaited: those whose methods are all `async` as they are, others with
        their plain methods in threads."""

        def made() -> Env:
            env = make()
            awaited = all(inspect.iscoroutinefunction(getattr(env, name)) for name in METHODS)
            return env if awaited else _Threaded(env, self._pool)

        return made

    async def close(self) -> None:
        """Begins no further call; one that goes on is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Threaded:
    """One episode's environment. Its calls never overlap, not even when one was given up on half-way."""

    def __init__(self, env: Any, pool: ThreadPoolExecutor) -> None:
        self._env = env
        self._pool = pool
        self.rates: Rates | None = getattr(env, "rates", None)
        self._last: asyncio.Future[Any] | None = None

    async def reset(self, task: Task) -> Start:
        start: Start = await self._call(self._env.reset, task)
        return start

    async def step(self, message: Message) -> Step:
        step: Step = await self._call(self._env.step, message)
        return step

    async def measure(self) -> Mapping[str, JSON]:
        signals: Mapping[str, JSON] = await self._call(self._env.measure)
        return signals

    def state_key(self) -> str:
        key: str = self._env.state_key()
        return key

    async def close(self) -> None:
        await self._call(self._env.close)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Raises SandboxError where the call before this one does not come to its end."""
        await self._ended()
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        self._last = asyncio.wrap_future(self._pool.submit(method, *arguments))
        found = await asyncio.shield(self._last)  # a thread cannot be stopped: the next call must know of this one
        return await found if inspect.isawaitable(found) else found

    async def _ended(self) -> None:
        if self._last is None:
            return
        done, _ = await asyncio.wait({self._last}, timeout=GRACE)
        if not done:
            raise SandboxError(
                f"a call of the environment {type(self._env).__name__} went on for {GRACE:g} s after its episode's "
                "time was up; give its work a time limit of its own"
            )
        if self._last.cancelled() or self._last.exception() is not None:
            return  # whoever called was told, or is gone
        if inspect.iscoroutine(found := self._last.result()):
            found.close()  # one that nobody was there to await; others have ended
