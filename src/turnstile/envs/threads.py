"""Environments whose methods are plain functions.

Each call runs in a thread of a bounded pool, so that other episodes continue while it computes or blocks.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from turnstile.envs.base import Env, Rates, Start, Step
from turnstile.errors import SandboxError
from turnstile.types import JSON, Message, Task

METHODS = ("reset", "step", "measure", "close")
_log = logging.getLogger(__name__)
GRACE = 30.0
"""Seconds that a call may continue after its episode's time is up, before the episode is given up."""


class Call(Future[Any]):
    """A call of a plain method that is waiting, running or done."""

    def __init__(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        owner = type(getattr(method, "__self__", None)).__name__
        self.name = f"{owner}.{getattr(method, '__name__', method)}"
        self._work = functools.partial(method, *arguments)

    def run(self) -> None:
        """Call the method, unless the call was cancelled while waiting."""
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(self._work())
            except BaseException as error:  # raised in the episode that made the call
                self.set_exception(error)


class Threads:
    """Runs at most `workers` calls of plain methods at once, over all episodes. Further calls wait their turn.

    A hanging call that was given up yields its place to the next one, so that such calls do not use up all places. Its
    thread keeps running but does not prevent the process from ending.
    """

    def __init__(self, workers: int) -> None:
        self._free = workers
        self._waiting: deque[Call] = deque()
        self._running: set[Call] = set()
        self._lock = threading.Lock()

    def submit(self, method: Callable[..., Any], *arguments: Any) -> Call:
        """Run a method in a thread as soon as there is a free place, and return its call."""
        call = Call(method, arguments)
        with self._lock:
            self._waiting.append(call)
        self._begin()
        return call

    def leave(self, call: Call) -> None:
        """Free the place of a call that has ended or hangs, for the next waiting call."""
        with self._lock:
            if call in self._running:
                self._running.remove(call)
                self._free += 1
        self._begin()

    def busy(self) -> str:
        """Return the names of the running calls with their counts, as text for a message."""
        with self._lock:
            return ", ".join(
                f"{count} x {name}" for name, count in Counter(call.name for call in self._running).items()
            )

    def _begin(self) -> None:
        with self._lock:
            if not self._free or not self._waiting:
                return
            self._free -= 1
            call = self._waiting.popleft()
            self._running.add(call)
        threading.Thread(target=self._run, args=(call,), name=f"environment, {call.name}", daemon=True).start()

    def _run(self, call: Call) -> None:
        try:
            call.run()
        finally:
            self.leave(call)

    def around(self, make: Callable[[], Any]) -> Callable[[], Env]:
        """Return a function that makes environments with awaitable methods.

        An environment whose methods are all `async` is left unchanged; otherwise its plain methods run in threads.
        """

        def made() -> Env:
            env = make()
            awaited = all(inspect.iscoroutinefunction(getattr(env, name)) for name in METHODS)
            return env if awaited else _Threaded(env, self)

        return made

    async def close(self) -> None:
        """Cancel the waiting calls and start no more. Running calls are not waited for."""
        with self._lock:
            waiting, self._waiting, self._free = self._waiting, deque(), 0
        for call in waiting:
            call.cancel()


class _Threaded:
    """One episode's environment, whose calls never overlap, even after one was given up halfway."""

    def __init__(self, env: Any, threads: Threads) -> None:
        self._env = env
        self._threads = threads
        self.rates: Rates | None = getattr(env, "rates", None)
        self._last: Call | None = None

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
        """Call a method, in a thread if it is plain. Raises SandboxError if the previous call does not end."""
        await self._wait_for_last()
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        self._last = call = self._threads.submit(method, *arguments)
        try:
            found = await asyncio.shield(asyncio.wrap_future(call))  # shielded, since a thread cannot be stopped
        except asyncio.CancelledError:
            if call.cancel():  # the call had not begun
                _log.warning("%s was given up on before it had a thread; busy: %s", call.name, self._threads.busy())
            raise
        return await found if inspect.isawaitable(found) else found

    async def _wait_for_last(self) -> None:
        if self._last is None:
            return
        ending = asyncio.wrap_future(self._last)
        await asyncio.wait({ending}, timeout=GRACE)
        if not ending.done():
            self._threads.leave(self._last)
            raise SandboxError(
                f"{self._last.name} of the environment went on for {GRACE:g} s after its episode's time was up; give "
                "its work a time limit of its own"
            )
        if ending.cancelled() or ending.exception() is not None:
            return  # the caller has seen this, or is gone
        if inspect.iscoroutine(found := ending.result()):
            found.close()  # a coroutine that was never awaited; others have ended
