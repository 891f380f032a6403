"""One of the router's servers, with its reachability and the weights that it samples with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from turnstile.engines.base import Engine
from turnstile.engines.remote.downtime import record_downtime, track_downtime
from turnstile.engines.remote.weights import PublishedWeights
from turnstile.errors import ConfigError, EngineError, EngineGoneError, RequestFailedError, WeightsLostError
from turnstile.types import I32, Completion, Sampling

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)
MAX_LOSSES = 3  # times that a server may lose its weights without a completion in between
MAX_SILENT_CHECKS = 3  # unanswered health checks in a row after which a busy server counts as unreachable


class Replica(Engine, Protocol):
    """An engine that can become unreachable.

    `connect`, `load` and `generate` then raise EngineGoneError; they raise RequestFailedError if the server is
    reachable but could not answer. `context` is the number of tokens that the model can hold (0: unknown); `loaded` are
    the weights that it samples with (None: the initial ones, or lost); `stats` counts what was answered.
    """

    url: str
    context: int
    loaded: PublishedWeights | None
    stats: dict[str, float]

    async def connect(self, prompt_ids: I32) -> None:
        """Find out, once, what kind of server it is and what it can do; `prompt_ids` is any prompt."""
        ...

    async def load(self, weights: PublishedWeights) -> None:
        """Make the server sample with `weights`."""
        ...

    def reset(self) -> None:
        """Forget what is known about the server, since another one may have taken its place while it was gone."""
        ...

    async def healthy(self) -> bool:
        """Return whether the server answers a health check now."""
        ...

    async def disconnect(self) -> None:
        """Close the connections."""
        ...


class ManagedReplica:
    """A replica and its state in the router.

    The server's health is checked every `health_interval` seconds while it is unreachable, has requests or loads
    weights. `on_return` is called when it is reachable again.
    """

    def __init__(self, number: int, engine: Replica, *, health_interval: float, on_return: Callable[[], None]) -> None:
        self.number = number
        self.engine = engine
        self.sessions = 0
        self.target_weights: PublishedWeights | None = None
        self.unreachable: EngineGoneError | None = None  # the reason, while it is unreachable
        self._health_interval, self._on_return = health_interval, on_return
        self._probe_prompt: I32 | None = None  # any prompt, to connect with when the server is back
        self._loads_unanswered = 0  # times that it was given weights since its last completion
        self._went_away = asyncio.Event()  # set while it is unreachable
        self._requests: set[asyncio.Task[Any]] = set()  # requests under way, and loads of weights
        self._loading: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None

    @property
    def was_used(self) -> bool:
        """Whether it has been asked to connect or to sample."""
        return self._probe_prompt is not None

    @property
    def is_stale(self) -> bool:
        """Whether there are target weights that it does not sample with."""
        return self.target_weights is not None and self.engine.loaded != self.target_weights

    async def connect(self, prompt_ids: I32) -> None:
        """Connect as `Replica.connect` does, and mark a server that cannot be reached as unreachable."""
        self._probe_prompt = prompt_ids
        try:
            await self.engine.connect(prompt_ids)
        except EngineGoneError as error:
            self.mark_unreachable(error)
            raise
        except RequestFailedError as error:
            await self._check_reachable(error)
            raise

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        """Sample with the target weights, waiting while they load.

        Raises EngineGoneError if the server is or becomes unreachable; RequestFailedError if it is reachable and could
        not answer this request, which says nothing about other requests; ConfigError if it cannot load weights or
        repeatedly loses them.
        """
        self._probe_prompt = prompt_ids
        while True:
            if self.unreachable is not None:
                raise self.unreachable
            if self.is_stale:
                with track_downtime(f"the server at {self.engine.url} was loading weights"):
                    await self._wait_until_loaded()
                continue
            started = time.monotonic()
            try:
                completion = await self._request(self.engine.generate(prompt_ids, sampling, session))
            except WeightsLostError as error:
                if self._loads_unanswered > MAX_LOSSES:
                    raise ConfigError(f"{error}, repeatedly; run exactly one server at this address") from None
                _log.warning("%s; it loads them again", error)
                record_downtime(str(error), started)
            except EngineGoneError as error:
                self.mark_unreachable(error)
            except RequestFailedError as error:
                await self._check_reachable(error)
                raise
            else:
                self._loads_unanswered = 0
                return completion

    def load(self) -> asyncio.Task[None]:
        """Start loading the target weights unless a load is under way; return the task that loads.

        A server that fails to load them becomes unreachable.
        """
        if self._loading is None or self._loading.done():
            self._loading = asyncio.ensure_future(self._load_target())
            # Retrieves the error, which the waiting requests get.
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._loading

    def mark_unreachable(self, error: EngineGoneError) -> None:
        """Mark the server as unreachable and start waiting for its return."""
        if self.unreachable is None:
            self.unreachable = error
            self._went_away.set()
            self.engine.reset()
            _log.warning("%s; its sessions move to other servers until it is back", error)
            self._recovering = asyncio.ensure_future(self._recover())

    async def _check_reachable(self, error: RequestFailedError) -> None:
        """Raise EngineGoneError if a server that could not answer fails a health check too."""
        if await self.engine.healthy():
            return
        self.mark_unreachable(EngineGoneError(f"{error}, and does not answer health checks"))
        assert self.unreachable is not None
        raise self.unreachable from None

    async def close(self) -> None:
        """Cancel all tasks and close the connections."""
        for task in (self._recovering, self._loading, self._checking):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self.engine.disconnect()

    async def _wait_until_loaded(self) -> None:
        """Wait until the target weights are loaded or the server is unreachable, since a hanging server never loads.

        Raises ConfigError for a server that cannot load weights.
        """
        loading, went_away = self.load(), asyncio.ensure_future(self._went_away.wait())
        try:
            await asyncio.wait([loading, went_away], return_when=asyncio.FIRST_COMPLETED)
        finally:
            went_away.cancel()
        if self.unreachable is None:
            loading.result()

    async def _request(self, request: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Return the answer to a request; cancel it and raise EngineGoneError if the server becomes unreachable."""
        task = asyncio.ensure_future(request)
        self._requests.add(task)
        if self._checking is None or self._checking.done():
            self._checking = asyncio.ensure_future(self._check_health())
        try:
            await asyncio.wait([task])
        finally:
            self._requests.discard(task)
            if task.cancel():  # the caller was cancelled
                await asyncio.wait([task])
                task.cancelled() or task.exception()  # retrieves the error, which no caller gets
        if task.cancelled():
            assert self.unreachable is not None
            raise self.unreachable
        return task.result()

    async def _load_target(self) -> None:
        """Load the target weights, and again if newer ones were published while a load was running.

        The folder of an older version may be removed meanwhile; the failure of its load is ignored.
        """
        while self.is_stale:
            weights = self.target_weights
            assert weights is not None
            assert self._probe_prompt is not None
            try:
                await self._request(self._load_once(weights, self._probe_prompt))
                self._loads_unanswered += 1
            except EngineGoneError as error:
                self.mark_unreachable(error)
                return
            except EngineError as error:
                if weights is self.target_weights:
                    self.mark_unreachable(EngineGoneError(f"{error}; it did not load the weights"))
                    return

    async def _load_once(self, weights: PublishedWeights, prompt_ids: I32) -> None:
        await self.engine.connect(prompt_ids)
        with weights.locked():
            await self.engine.load(weights)

    async def _check_health(self) -> None:
        """Check the server's health while it has requests, since it may hang without closing its connections.

        After `MAX_SILENT_CHECKS` unanswered checks in a row, mark it as unreachable and cancel its requests.
        """
        silent_checks = 0
        while self._requests:
            await asyncio.sleep(self._health_interval)
            silent_checks = 0 if await self.engine.healthy() else silent_checks + 1
            if silent_checks == MAX_SILENT_CHECKS:
                silent_checks = 0
                self.mark_unreachable(EngineGoneError(f"the server at {self.engine.url} does not answer health checks"))
                for task in self._requests:
                    task.cancel()

    async def _recover(self) -> None:
        """Mark the server as reachable again once it answers and has the target weights."""
        since = time.monotonic()
        if self._loading is not None and not self._loading.done():
            await asyncio.wait([self._loading])
        while self.unreachable is not None:
            await asyncio.sleep(self._health_interval)
            if not await self.engine.healthy():
                continue
            self.engine.reset()
            try:
                await self._load_target()
            except ConfigError as error:
                _log.warning("%s", error)
            if not self.is_stale:
                _log.warning("server %d is back after %.0f s", self.number, time.monotonic() - since)
                self.unreachable = None
                self._went_away.clear()
                self._on_return()
