"""Several servers of one model as one engine: sessions stay where they were, and leave a server that is gone."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turnstile.engines.base import Engine
from turnstile.errors import ConfigError, EngineError, EngineGoneError
from turnstile.types import I32, Completion, Sampling

_log = logging.getLogger(__name__)


class Replica(Engine, Protocol):
    """An engine that can be gone: `meet` and `generate` raise EngineGoneError then. `context` is how many tokens it
    can hold, 0 where it does not say."""

    context: int

    async def meet(self, prompt_ids: I32) -> None: ...

    async def healthy(self) -> bool: ...

    async def disconnect(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Place:
    """One replica: since when it is gone, and how many sessions it has."""

    number: int
    engine: Replica
    gone_at: float | None = None
    sessions: int = 0
    looking: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Session:
    share: str
    place: _Place
    inner: str  # what the replica calls it


class Router:
    """Obeys `engines.base.Engine` over `replicas` of one model, whose answers must not depend on which one gives them.

    The sessions of one share go to one replica, which computes what they have in common once, and stay there; a new
    share goes where the fewest sessions are. A request whose replica is gone is made at another one, whole, since a
    prompt always is. A replica that is gone is asked every `again` seconds whether it is back. Raises EngineGoneError
    when all are gone.
    """

    def __init__(self, replicas: Sequence[Replica], *, again: float = 5.0) -> None:
        if not replicas:
            raise ConfigError("a router needs a server at least; name their addresses in engine.url")
        self._places = [_Place(number, engine) for number, engine in enumerate(replicas)]
        self._again = again
        self.context = 0
        self._sessions: dict[str, _Session] = {}
        self._homes: dict[str, _Place] = {}  # of each share
        self._numbers = itertools.count()

    def open(self, share: str) -> str:
        session = f"{share}#{next(self._numbers)}"
        place = self._home(share) or self._places[0]  # where all are gone, the first request says so
        self._sessions[session] = _enter(share, place)
        return session

    def close(self, session: str) -> None:
        held = self._sessions.pop(session)
        _leave(held)
        if all(other.share != held.share for other in self._sessions.values()):
            self._homes.pop(held.share, None)

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        while True:
            held = self._sessions[session]
            try:
                return await held.place.engine.generate(prompt_ids, sampling, held.inner)
            except EngineGoneError as error:
                self._miss(held.place, error)
                place = self._home(held.share)
                if place is None:
                    raise EngineGoneError(f"none of {len(self._places)} servers answers; the last: {error}") from None
                if session not in self._sessions:
                    raise  # closed meanwhile
                _leave(held)
                self._sessions[session] = _enter(held.share, place)

    async def meet(self, prompt_ids: I32) -> None:
        """Finds out what the servers are and can do. Raises as the first of them does, but for one that is gone while
        others are there."""
        for place in self._places:
            try:
                await place.engine.meet(prompt_ids)
            except EngineGoneError as error:
                self._miss(place, error)
                if all(other.gone_at is not None for other in self._places):
                    raise
        self.context = min((place.engine.context for place in self._places if place.engine.context), default=0)

    async def healthy(self) -> bool:
        """Whether one of them answers just now."""
        return any(await asyncio.gather(*(place.engine.healthy() for place in self._places)))

    async def disconnect(self) -> None:
        """Closes the connections to all."""
        for place in self._places:
            if place.looking is not None:
                place.looking.cancel()
                await asyncio.wait([place.looking])
            await place.engine.disconnect()

    def _home(self, share: str) -> _Place | None:
        """The replica of a share: where it was, else the one with the fewest sessions of those that are there."""
        there = [place for place in self._places if place.gone_at is None]
        if not there:
            return None
        if self._homes.get(share) not in there:
            self._homes[share] = min(there, key=lambda place: (place.sessions, place.number))
        return self._homes[share]

    def _miss(self, place: _Place, error: EngineGoneError) -> None:
        """From now on a replica is gone, and is looked for."""
        if place.gone_at is None:
            place.gone_at = time.monotonic()
            _log.warning("%s; its sessions go to others until it is back", error)
            place.looking = asyncio.ensure_future(self._look(place))

    async def _look(self, place: _Place) -> None:
        while True:
            await asyncio.sleep(self._again)
            if await place.engine.healthy():
                assert place.gone_at is not None
                _log.warning("server %d is back after %.0f s", place.number, time.monotonic() - place.gone_at)
                place.gone_at = None
                return


def _enter(share: str, place: _Place) -> _Session:
    place.sessions += 1
    return _Session(share, place, place.engine.open(share))


def _leave(held: _Session) -> None:
    held.place.sessions -= 1
    held.place.engine.close(held.inner)
