"""A pool of slow-starting resources, which keeps some ready, limits parallel starts and backs off after failures."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from turnstile.errors import SandboxError
from turnstile.sandboxes.spares import Spares

_log = logging.getLogger(__name__)


class Member(Protocol):
    """A resource in a pool."""

    async def alive(self) -> bool: ...

    async def end(self) -> None:
        """End the member. Never raises an error: what cannot be ended now is left to a later sweep."""
        ...


K = TypeVar("K")
M = TypeVar("M", bound=Member)


@dataclass(frozen=True, slots=True)
class _Gates:
    """The semaphores of one event loop: for members in use and for members that are starting."""

    places: asyncio.Semaphore
    starts: asyncio.Semaphore


class Pool(Generic[K, M]):
    """A pool that hands out fresh members: at most `most` are in use, and up to `warm` more are kept ready.

    Members have kinds, and `start` starts one of a kind. The kinds kept ready are those requested last. At most
    `starts` members are being started at a time. After a failed start all starts wait, at first `pause` seconds and
    then twice as long each time, up to `longest` seconds. A request fails after `tries` failed starts, or if no place
    is free within `patience` seconds. A pool may be used from one event loop after another, but not from two at once.
    """

    def __init__(
        self,
        start: Callable[[K], Awaitable[M]],
        *,
        warm: int,
        most: int,
        starts: int,
        tries: int = 6,
        pause: float = 0.5,
        longest: float = 30.0,
        patience: float = 900.0,
    ) -> None:
        if most < 1 or starts < 1 or warm < 0:
            raise ValueError("a pool needs room for one member and for one start, and no fewer than no spares")
        self._start_one = start
        self._most = most
        self._starts = starts
        self._tries = tries
        self._pause = pause
        self._longest = longest
        self._patience = patience
        self._spares: Spares[K, M] = Spares(warm)
        self._failures = 0
        self._not_before = 0.0
        self._gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Gates] = weakref.WeakKeyDictionary()
        self._warming: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def ready(self) -> int:
        """The number of members that are kept ready."""
        return len(self._spares)

    async def take(self, kind: K, *, spares: bool = True) -> M:
        """Return a live member of a kind, preferably one that is kept ready.

        With `spares` false a new one is started, and none of this kind is kept ready. Call `leave` when the member has
        ended. Raises SandboxError if no place becomes free in time or no member can be started.
        """
        gates = self._current_gates()
        try:
            async with asyncio.timeout(self._patience):
                await gates.places.acquire()
        except TimeoutError:
            raise SandboxError(
                f"no sandbox was free for {self._patience:.0f} s: all {self._most} are in use; raise sandbox.pool.most"
            ) from None
        try:
            if spares:
                self._end_in_background(self._spares.ask(kind))
            while spares and (member := self._spares.take(kind)) is not None:
                if await member.alive():
                    return member
                await member.end()
            return await self._start(kind, self._tries)
        except BaseException:
            gates.places.release()
            raise
        finally:
            if spares:
                self._refill(kind)

    def leave(self) -> None:
        """Free the place of a member that has ended."""
        self._current_gates().places.release()

    async def close(self) -> None:
        """End the members that are ready or starting."""
        self._closed = True
        for task in tuple(self._warming):
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)
        self._end_in_background(self._spares.empty())
        await asyncio.gather(*self._ending)

    def _current_gates(self) -> _Gates:
        loop = asyncio.get_running_loop()
        if loop not in self._gates:
            self._gates[loop] = _Gates(asyncio.Semaphore(self._most), asyncio.Semaphore(self._starts))
        return self._gates[loop]

    def _end_in_background(self, members: list[M]) -> None:
        for member in members:
            task = asyncio.ensure_future(member.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _refill(self, kind: K) -> None:
        if self._failures or self._closed:
            return  # the next requested start shows whether starts succeed again
        for _ in range(self._spares.missing - len(self._warming)):
            task = asyncio.ensure_future(self._warm_one(kind))
            self._warming.add(task)
            task.add_done_callback(self._warming.discard)

    async def _warm_one(self, kind: K) -> None:
        try:
            member = await self._start(kind, 1)
        except SandboxError as error:
            _log.warning("no spare sandbox could be started: %s", error)
            return
        if self._closed:
            await member.end()
        else:
            self._spares.put(kind, member)

    async def _start(self, kind: K, tries: int) -> M:
        while True:
            async with self._current_gates().starts:
                await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
                try:
                    member = await self._start_one(kind)
                except SandboxError:
                    tries -= 1
                    self._failures += 1
                    wait = min(self._longest, self._pause * 2 ** (self._failures - 1))
                    self._not_before = time.monotonic() + wait * random.uniform(0.75, 1.25)
                    if tries <= 0 or self._closed:
                        raise
                else:
                    self._failures = 0
                    return member
