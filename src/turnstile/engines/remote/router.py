"""Use several servers of one model as one engine.

Sessions stay on their server until it becomes unreachable, and every server gets the newest weights before it samples.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from turnstile.engines.remote.downtime import record_downtime, track_downtime
from turnstile.engines.remote.replica import ManagedReplica, Replica
from turnstile.engines.remote.weights import PublishedWeights
from turnstile.errors import ConfigError, EngineError, EngineGoneError
from turnstile.types import I32, Completion, Sampling

MAX_MOVES = 8
"""Most moves of one request to another server; further failures count as the request's own fault."""
STATS = ("requests", "tokens_asked", "tokens_sampled")


@dataclass(slots=True, eq=False)
class _Session:
    share: str
    replica: ManagedReplica
    inner_session: str  # the replica's id of the session


class Router:
    """Routes sessions over `replicas` of one model, any of which may answer; implements `engines.base.Engine`.

    The sessions of one share go to one replica, which computes their shared prefix once, and stay there; a new share
    goes to the replica with the fewest sessions. A request whose replica becomes unreachable is sent to another one,
    since its prompt is complete. Every replica that is unreachable, has requests or loads weights is checked every
    `health_interval` seconds. If all are unreachable, requests wait up to `reconnect_timeout` seconds for one to
    return. After that they raise EngineGoneError, as does a request that has lost its server more than `MAX_MOVES`
    times. A request that a reachable server cannot answer is not sent to another one, but raises RequestFailedError.

    After `publish`, a replica samples with those weights only: it loads them before its next request, and again if it
    has lost them. One that fails to load them counts as unreachable until it succeeds.
    """

    def __init__(
        self, replicas: Sequence[Replica], *, health_interval: float = 5.0, reconnect_timeout: float = 0.0
    ) -> None:
        if not replicas:
            raise ConfigError("a router needs a server at least; name their addresses in engine.url")
        self._returned = asyncio.Event()
        self._replicas = [
            ManagedReplica(number, engine, health_interval=health_interval, on_return=self._returned.set)
            for number, engine in enumerate(replicas)
        ]
        self._reconnect_timeout = reconnect_timeout
        self._num_requests = 0  # requests under way
        self._busy_since = self._busy_seconds = 0.0
        self._counted = dict.fromkeys(STATS, 0.0)
        self.context = 0
        self._sessions: dict[str, _Session] = {}
        self._home_of: dict[str, ManagedReplica] = {}  # share -> its replica
        self._numbers = itertools.count()

    def open(self, share: str) -> str:
        """Open a session on the share's replica and return its id."""
        session = f"{share}#{next(self._numbers)}"
        replica = self._choose_home(share) or self._replicas[0]  # the first request reports if all are gone
        self._sessions[session] = _open_on(share, replica)
        return session

    def close(self, session: str) -> None:
        """Close a session; after a share's last one, the share may go to another replica."""
        state = self._sessions.pop(session)
        _close_on(state)
        if all(other.share != state.share for other in self._sessions.values()):
            self._home_of.pop(state.share, None)

    def publish(self, weights: PublishedWeights) -> None:
        """Make `weights` the target weights of every replica.

        Reachable replicas that have been used start loading them now.
        """
        for replica in self._replicas:
            replica.target_weights = weights
            if replica.unreachable is None and replica.was_used:
                replica.load()

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        """Sample a completion on the session's replica, moving the session if the replica becomes unreachable."""
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        with self._count_busy_time():
            for attempt in itertools.count(1):
                state, started = self._sessions[session], time.monotonic()
                try:
                    return await state.replica.generate(prompt_ids, sampling, state.inner_session)
                except EngineGoneError as error:
                    record_downtime(str(error), started)
                    if attempt > MAX_MOVES:
                        raise EngineGoneError(
                            f"a request has lost its server {attempt} times; the last: {error}"
                        ) from None
                    with track_downtime(str(error)):
                        await self._move(session, error)
        raise AssertionError("a request ends with a completion or an error")

    async def _move(self, session: str, error: EngineGoneError) -> None:
        """Move a session whose server is unreachable to another replica, waiting for one if necessary."""
        state = self._sessions[session]
        deadline = time.monotonic() + self._reconnect_timeout
        while (replica := self._choose_home(state.share)) is None:
            self._returned.clear()
            try:
                await asyncio.wait_for(self._returned.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                count = len(self._replicas)
                raise EngineGoneError(f"none of {count} servers answers; the last: {error}") from None
        if session not in self._sessions:
            raise error  # the session was closed meanwhile
        if state.replica is not replica:
            _close_on(state)
            self._sessions[session] = _open_on(state.share, replica)

    def take_stats(self) -> dict[str, float]:
        """Return answered requests, their tokens, and the seconds with requests under way, since the last call."""
        counted = {name: sum(replica.engine.stats[name] for replica in self._replicas) for name in STATS}
        taken = {name: counted[name] - self._counted[name] for name in STATS}
        now = time.monotonic()
        taken["seconds"] = self._busy_seconds + (now - self._busy_since if self._num_requests else 0.0)
        self._counted, self._busy_seconds, self._busy_since = counted, 0.0, now
        return taken

    @contextmanager
    def _count_busy_time(self) -> Iterator[None]:
        """Count the time inside as busy, once for all requests that overlap."""
        if not self._num_requests:
            self._busy_since = time.monotonic()
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._busy_seconds += time.monotonic() - self._busy_since

    async def connect(self, prompt_ids: I32) -> None:
        """Connect to all servers; raise the first error, but ignore unreachable servers unless all are unreachable."""
        for replica in self._replicas:
            try:
                await replica.connect(prompt_ids)
            except EngineGoneError:
                if all(other.unreachable is not None for other in self._replicas):
                    raise
        self.context = min((replica.engine.context for replica in self._replicas if replica.engine.context), default=0)

    async def is_reachable(self, session: str) -> bool:
        """Return whether the session's server answers a health check now."""
        replica = self._sessions[session].replica
        return replica.unreachable is None and await replica.engine.healthy()

    async def healthy(self) -> bool:
        """Return whether any server answers a health check now."""
        return any(await asyncio.gather(*(replica.engine.healthy() for replica in self._replicas)))

    async def disconnect(self) -> None:
        """Close all connections."""
        for replica in self._replicas:
            await replica.close()

    def _choose_home(self, share: str) -> ManagedReplica | None:
        """Return the replica assigned to a share, or None if all are unreachable.

        The current one stays if it is reachable; otherwise it is the reachable one with the fewest sessions.
        """
        reachable = [replica for replica in self._replicas if replica.unreachable is None]
        if not reachable:
            return None
        if self._home_of.get(share) not in reachable:
            self._home_of[share] = min(reachable, key=lambda replica: (replica.sessions, replica.number))
        return self._home_of[share]


def _open_on(share: str, replica: ManagedReplica) -> _Session:
    replica.sessions += 1
    return _Session(share, replica, replica.engine.open(share))


def _close_on(state: _Session) -> None:
    state.replica.sessions -= 1
    state.replica.engine.close(state.inner_session)
