"""Several servers of one model as one engine: sessions stay where they were, and leave a server that is gone; each has
the newest weights before it samples."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from turnstile.engines.remote.downtime import losing, lost
from turnstile.engines.remote.replica import Place, Replica
from turnstile.engines.remote.weights import Weights
from turnstile.errors import ConfigError, EngineError, EngineGoneError
from turnstile.types import I32, Completion, Sampling

MOVES = 8
"""How often one request is made anew because its server went, before that is held to be the request's own doing."""
STATS = ("requests", "tokens_asked", "tokens_sampled")


@dataclass(slots=True, eq=False)
class _Session:
    share: str
    place: Place
    inner: str  # what the replica calls it


class Router:
    """Obeys `engines.base.Engine` over `replicas` of one model, whose answers must not depend on which one gives them.

    The sessions of one share go to one replica, which computes what they have in common once, and stay there; a new
    share goes where the fewest sessions are. A request whose replica is gone is made at another one, whole, since a
    prompt always is. A replica is asked every `again` seconds whether it is there, while it is gone and while it has
    requests or loads weights. When all are gone one is waited for, up to `reconnect_timeout` seconds; then
    EngineGoneError is raised, and also where a request has lost its server `MOVES` times. What a server that is there
    cannot answer is asked of no other: RequestFailedError.

    After `publish` a replica samples with those weights and no others: it is given them before its next request, and
    again where it has lost them. One that does not take them is gone until it does.
    """

    def __init__(self, replicas: Sequence[Replica], *, again: float = 5.0, reconnect_timeout: float = 0.0) -> None:
        if not replicas:
            raise ConfigError("a router needs a server at least; name their addresses in engine.url")
        self._back = asyncio.Event()
        self._places = [
            Place(number, engine, again=again, back=self._back.set) for number, engine in enumerate(replicas)
        ]
        self._reconnect_timeout = reconnect_timeout
        self._asked = 0  # requests under way
        self._began = self._busy = 0.0
        self._counted = dict.fromkeys(STATS, 0.0)
        self.context = 0
        self._sessions: dict[str, _Session] = {}
        self._homes: dict[str, Place] = {}  # of each share
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

    def publish(self, weights: Weights) -> None:
        """From now on every replica samples with these, and all that are there are given them at once."""
        for place in self._places:
            place.wanted = weights
            if place.gone is None and place.met:
                place.load()

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        with self._under_way():
            for moved in itertools.count(1):
                held, began = self._sessions[session], time.monotonic()
                try:
                    return await held.place.ask(prompt_ids, sampling, held.inner)
                except EngineGoneError as error:
                    lost(str(error), began)
                    if moved > MOVES:
                        raise EngineGoneError(
                            f"a request has lost its server {moved} times; the last: {error}"
                        ) from None
                    with losing(str(error)):
                        await self._move(session, error)
        raise AssertionError("a request ends with an answer or an error")

    async def _move(self, session: str, error: EngineGoneError) -> None:
        """A session whose server is gone goes to another, once there is one."""
        held = self._sessions[session]
        deadline = time.monotonic() + self._reconnect_timeout
        while (place := self._home(held.share)) is None:
            self._back.clear()
            try:
                await asyncio.wait_for(self._back.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                count = len(self._places)
                raise EngineGoneError(f"none of {count} servers answers; the last: {error}") from None
        if session not in self._sessions:
            raise error  # closed meanwhile
        if held.place is not place:
            _leave(held)
            self._sessions[session] = _enter(held.share, place)

    def take_stats(self) -> dict[str, float]:
        """What was done since the last call: tokens of requests that were answered, and the seconds in which some were
        under way."""
        counted = {name: sum(place.engine.stats[name] for place in self._places) for name in STATS}
        taken = {name: counted[name] - self._counted[name] for name in STATS}
        now = time.monotonic()
        taken["seconds"] = self._busy + (now - self._began if self._asked else 0.0)
        self._counted, self._busy, self._began = counted, 0.0, now
        return taken

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Adds up the seconds in which there are requests."""
        if not self._asked:
            self._began = time.monotonic()
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1
            if not self._asked:
                self._busy += time.monotonic() - self._began

    async def meet(self, prompt_ids: I32) -> None:
        """Finds out what the servers are and can do. Raises as the first of them does, but for one that is gone while
        others are there."""
        for place in self._places:
            try:
                await place.meet(prompt_ids)
            except EngineGoneError:
                if all(other.gone is not None for other in self._places):
                    raise
        self.context = min((place.engine.context for place in self._places if place.engine.context), default=0)

    async def answers(self, session: str) -> bool:
        """Whether the session's server says, just now, that it is there."""
        place = self._sessions[session].place
        return place.gone is None and await place.engine.healthy()

    async def healthy(self) -> bool:
        """Whether one of them answers just now."""
        return any(await asyncio.gather(*(place.engine.healthy() for place in self._places)))

    async def disconnect(self) -> None:
        """Closes the connections to all."""
        for place in self._places:
            await place.close()

    def _home(self, share: str) -> Place | None:
        """The replica of a share: where it was, else the one with the fewest sessions of those that are there."""
        there = [place for place in self._places if place.gone is None]
        if not there:
            return None
        if self._homes.get(share) not in there:
            self._homes[share] = min(there, key=lambda place: (place.sessions, place.number))
        return self._homes[share]


def _enter(share: str, place: Place) -> _Session:
    place.sessions += 1
    return _Session(share, place, place.engine.open(share))


def _leave(held: _Session) -> None:
    held.place.sessions -= 1
    held.place.engine.close(held.inner)
