"""One of several servers as the router has it: whether it is there, and which weights it samples with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from turnstile.engines.base import Engine
from turnstile.engines.remote.downtime import losing, lost
from turnstile.engines.remote.weights import Weights
from turnstile.errors import ConfigError, EngineError, EngineGoneError, RequestFailedError, WeightsLostError
from turnstile.types import I32, Completion, Sampling

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)
LOSSES = 3  # of its weights, without an answer in between, that are put up with
SILENT = 3  # health checks in a row without an answer, after which a server with work under way counts as gone


class Replica(Engine, Protocol):
    """An engine that can be gone: `meet`, `load` and `generate` raise EngineGoneError then, and RequestFailedError
    where it is there and could not answer. `context` is how many tokens it can hold, 0 where it does not say; `loaded`
    are the weights that it samples with, where it was given some, and it is None again when they are lost; `stats`
    counts what was answered."""

    url: str
    context: int
    loaded: Weights | None
    stats: dict[str, float]

    async def meet(self, prompt_ids: I32) -> None: ...

    async def load(self, weights: Weights) -> None: ...

    def renew(self) -> None: ...

    async def healthy(self) -> bool: ...

    async def disconnect(self) -> None: ...


class Place:
    """A replica and what the router knows of it. While it is gone it is asked every `again` seconds whether it is back,
    and `back` is called when it is; while it has requests, or loads weights, it is asked as often whether it still is
    there."""

    def __init__(self, number: int, engine: Replica, *, again: float, back: Callable[[], None]) -> None:
        self.number = number
        self.engine = engine
        self.sessions = 0
        self.wanted: Weights | None = None
        self.gone: EngineGoneError | None = None  # why, while it is
        self._again, self._back = again, back
        self._prompt: I32 | None = None  # any, to meet the server with when it is back
        self._given = 0  # times that it got weights since it last answered
        self._left = asyncio.Event()  # set while it is gone
        self._requests: set[asyncio.Task[Any]] = set()  # and what gives it weights
        self._loading: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def met(self) -> bool:
        """Whether anything was asked of it."""
        return self._prompt is not None

    @property
    def lacks(self) -> bool:
        """Whether it does not have the weights that are wanted."""
        return self.wanted is not None and self.engine.loaded != self.wanted

    async def meet(self, prompt_ids: I32) -> None:
        """Raises as `Replica.meet`; a server that is gone is so from then on."""
        self._prompt = prompt_ids
        try:
            await self.engine.meet(prompt_ids)
        except EngineGoneError as error:
            self.miss(error)
            raise
        except RequestFailedError as error:
            await self._look_after(error)
            raise

    async def ask(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        """A completion by the weights that are wanted. Raises EngineGoneError where the server is gone, or goes, and
        RequestFailedError where it is there and could not answer this request: then others are none of its concern."""
        self._prompt = prompt_ids
        while True:
            if self.gone is not None:
                raise self.gone
            if self.lacks:
                with losing(f"the server at {self.engine.url} was being given weights"):
                    await self._loaded()
                continue
            began = time.monotonic()
            try:
                found = await self._once(self.engine.generate(prompt_ids, sampling, session))
            except WeightsLostError as error:
                if self._given > LOSSES:
                    raise ConfigError(f"{error}, again and again; is there one server alone at this address?") from None
                _log.warning("%s; it is given them again", error)
                lost(str(error), began)
            except EngineGoneError as error:
                self.miss(error)
            except RequestFailedError as error:
                await self._look_after(error)
                raise
            else:
                self._given = 0
                return found

    def load(self) -> asyncio.Task[None]:
        """Gives it the weights that are wanted; where it does not take them it is gone."""
        if self._loading is None or self._loading.done():
            self._loading = asyncio.ensure_future(self._give())
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen by who waits
        return self._loading

    def miss(self, error: EngineGoneError) -> None:
        """From now on it is gone, and is looked for."""
        if self.gone is None:
            self.gone = error
            self._left.set()
            self.engine.renew()
            _log.warning("%s; its sessions go to others until it is back", error)
            self._looking = asyncio.ensure_future(self._look())

    async def _look_after(self, error: RequestFailedError) -> None:
        """Whether a server that could not answer is there at all. Raises EngineGoneError where it does not say so."""
        if await self.engine.healthy():
            return
        self.miss(EngineGoneError(f"{error}, nor does it say that it is there"))
        assert self.gone is not None
        raise self.gone from None

    async def close(self) -> None:
        for task in (self._looking, self._loading, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self.engine.disconnect()

    async def _loaded(self) -> None:
        """Until it was given the weights that are wanted, or is gone: one that hangs ends no load. Raises ConfigError
        for a server that cannot take any."""
        loading, left = self.load(), asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait([loading, left], return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
        if self.gone is None:
            loading.result()

    async def _once(self, asked: Coroutine[Any, Any, _Answer]) -> _Answer:
        """The answer to a request, which is given up when the server is found to be gone."""
        task = asyncio.ensure_future(asked)
        self._requests.add(task)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait([task])
        finally:
            self._requests.discard(task)
            if task.cancel():  # who asked was cancelled
                await asyncio.wait([task])
                task.cancelled() or task.exception()  # nobody wants it any more
        if task.cancelled():
            assert self.gone is not None
            raise self.gone
        return task.result()

    async def _give(self) -> None:
        """Newer weights may come meanwhile, and those at hand be put away."""
        while self.lacks:
            weights = self.wanted
            assert weights is not None
            assert self._prompt is not None
            try:
                await self._once(self._hand(weights, self._prompt))
                self._given += 1
            except EngineGoneError as error:
                self.miss(error)
                return
            except EngineError as error:
                if weights is self.wanted:
                    self.miss(EngineGoneError(f"{error}; it has not taken the weights"))
                    return

    async def _hand(self, weights: Weights, prompt_ids: I32) -> None:
        await self.engine.meet(prompt_ids)
        with weights.held():
            await self.engine.load(weights)

    async def _watch(self) -> None:
        """A server may stop without closing its connections."""
        silent = 0
        while self._requests:
            await asyncio.sleep(self._again)
            silent = 0 if await self.engine.healthy() else silent + 1
            if silent == SILENT:
                silent = 0
                self.miss(EngineGoneError(f"the server at {self.engine.url} does not say that it is there"))
                for task in self._requests:
                    task.cancel()

    async def _look(self) -> None:
        """Until it is there, and has the weights that are wanted."""
        since = time.monotonic()
        if self._loading is not None and not self._loading.done():
            await asyncio.wait([self._loading])
        while self.gone is not None:
            await asyncio.sleep(self._again)
            if not await self.engine.healthy():
                continue
            self.engine.renew()
            try:
                await self._give()
            except ConfigError as error:
                _log.warning("%s", error)
            if not self.lacks:
                _log.warning("server %d is back after %.0f s", self.number, time.monotonic() - since)
                self.gone = None
                self._left.clear()
                self._back()
