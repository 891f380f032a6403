"""Remember results, such as those of test runs, and share a run among callers that want it at the same time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """Up to `size` results by key.

    Errors are not remembered, and neither is a result for which `passing` is true, as it may differ next time. `runs`
    counts the runs that were started, `reused` the requests answered without one.
    """

    def __init__(self, size: int, *, passing: Callable[[T], bool]) -> None:
        self._size = size
        self._passing = passing
        self._known: OrderedDict[str, T] = OrderedDict()
        self._running: dict[str, asyncio.Task[T]] = {}
        self.runs = 0
        self.reused = 0

    async def get(self, key: str, run: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """Return the result for a key, and whether it came from an earlier run or one started by another caller."""
        if key in self._known:
            self._known.move_to_end(key)
            self.reused += 1
            return self._known[key], True
        task = self._running.get(key)
        shared = task is not None
        if task is None:
            task = asyncio.create_task(self._run(run))
            self._running[key] = task
            task.add_done_callback(lambda done: self._settle(key, done))
        result = await asyncio.shield(task)  # cancelling one caller must not cancel the others
        self.reused += shared
        return result, shared

    def forget(self, key: str, result: T) -> None:
        """Forget a result that is no longer of use, unless another one has replaced it by now."""
        if self._known.get(key) is result:
            del self._known[key]

    async def close(self) -> None:
        """End the runs under way."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, run: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a run; one that may differ next time is replaced with that of a second run."""
        self.runs += 1
        result = await run()
        if self._passing(result):
            self.runs += 1
            result = await run()
        return result

    def _settle(self, key: str, task: asyncio.Task[T]) -> None:
        del self._running[key]
        if task.cancelled() or task.exception() is not None:
            return  # the awaiting callers get the error
        if self._passing(task.result()):
            return
        self._known[key] = task.result()
        while len(self._known) > self._size:
            self._known.popitem(last=False)
