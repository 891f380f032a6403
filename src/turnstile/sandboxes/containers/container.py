"""A running container of the pool, whose runner handles one request at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import IO, Any

from turnstile.errors import ContainerDiedError, SandboxError
from turnstile.sandboxes.containers.channel import Channel, ChannelClosedError
from turnstile.sandboxes.containers.daemon import Daemon, Spec

_log = logging.getLogger(__name__)

ALIVE = 5.0  # seconds within which a container must answer before it is handed out
GRACE = 30.0  # seconds past a command's own limit after which a silent container is given up


class Container:
    """A member of the pool: a running container and its runner, which handles one request at a time."""

    def __init__(self, daemon: Daemon, identity: str, channel: Channel, spec: Spec) -> None:
        self.identity = identity
        self.spec = spec
        self._daemon = daemon
        self._channel = channel
        self._started = time.time()
        self._turn = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._broken: SandboxError | None = None
        self._ended = False

    async def ask(
        self,
        request: Mapping[str, Any],
        data: IO[bytes] | None = None,
        *,
        seconds: float,
        into: IO[bytes] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Send one request and return its last answer with that answer's data.

        The data of earlier answers is written to `into`. Cancelling the caller cancels the running command. Raises
        SandboxError if the container is not usable or does not answer within `seconds`, and the ValueError or OSError
        that the request caused in it.
        """
        async with self._turn:
            if self._ended:
                raise SandboxError("the sandbox was closed")
            if self._broken is not None:
                raise self._broken
            asking = asyncio.ensure_future(self._converse(dict(request), data, into))
            try:
                async with asyncio.timeout(seconds):
                    answer, found = await asyncio.shield(asking)
            except TimeoutError:
                self._channel.shut()
                self._broken = ContainerDiedError(
                    f"container {self.identity[:12]} did not answer within {seconds:.0f} s"
                )
                await asyncio.gather(asking, return_exceptions=True)
                raise self._broken from None
            except asyncio.CancelledError:
                await self._cancel(asking)
                raise
            except ChannelClosedError:
                if self._ended:
                    raise SandboxError("the sandbox was closed while it was in use") from None
                self._broken = await self._daemon.call(self._daemon.fate, self.identity, self._started, self.stderr_end)
                raise self._broken from None
        check(answer, self.identity)
        return answer, found

    @property
    def stderr_end(self) -> str:
        """The end of what the runner wrote to standard error; empty unless it failed."""
        return self._channel.stderr_end.decode(errors="replace")

    async def alive(self) -> bool:
        try:
            await self.ask({"op": "ping"}, seconds=ALIVE)
        except SandboxError:
            return False
        return True

    async def commit(self) -> str:
        """Return the id of a new image of the files, made while no request is running."""
        async with self._turn:
            if self._ended:
                raise SandboxError("the sandbox was closed")
            return await self._daemon.call(self._daemon.commit, self.identity)

    def stop(self) -> None:
        """End the running command and fail its caller. The container itself is removed by `end`.

        If no command is running, the stream stays open. When the stream ends, the daemon begins a removal of its own
        and refuses ours, and only ours reports when it is complete.
        """
        self._ended = True
        if self._turn.locked():
            self._channel.shut()

    async def end(self) -> None:
        """Remove the container.

        If the daemon cannot remove it now, a warning is logged; the container then ends with its stream, or is left to
        a sweep.
        """
        self.stop()
        try:
            await self._daemon.call(self._daemon.remove, self.identity)
        except SandboxError as error:
            _log.warning("a container is left behind for now (turnstile sandbox prune removes it): %s", error)
        finally:
            self._channel.shut()
            self._channel.close()

    async def _converse(
        self, request: dict[str, Any], data: IO[bytes] | None, into: IO[bytes] | None
    ) -> tuple[dict[str, Any], bytes]:
        async with self._sending:
            await self._channel.send(request, data)
        while True:
            answer, found = await self._channel.receive()
            if not answer.pop("more", False):
                return answer, found
            if into is not None:
                await asyncio.to_thread(into.write, found)

    async def _cancel(self, asking: asyncio.Future[tuple[dict[str, Any], bytes]]) -> None:
        """End the current request at once, so that the next answer belongs to the next request."""
        try:
            if not asking.done():
                async with self._sending:
                    await self._channel.send({"op": "cancel"})
        except ChannelClosedError:
            pass  # the container has ended, which is reported below
        done, _ = await asyncio.wait([asking], timeout=GRACE)
        if not done:
            self._channel.shut()
            await asyncio.wait([asking])
        if asking.cancelled() or asking.exception() is not None:
            self._broken = ContainerDiedError(f"container {self.identity[:12]} ended while a command was cancelled")


def check(answer: Mapping[str, Any], identity: str) -> None:
    """Raise the error that a runner's answer reports, if any."""
    if "value" in answer:
        raise ValueError(answer["value"])
    if "gone" in answer:
        raise SandboxError(f"the sandbox in container {identity[:12]} is broken: {answer['gone']}")
    if "errno" in answer:
        raise OSError(answer["errno"], answer["text"])
    if "fault" in answer:
        raise SandboxError(f"container {identity[:12]} cannot do that: {answer['fault'].strip().splitlines()[-1]}")
