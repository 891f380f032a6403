"""A client's lease at a sandbox server, which lasts while the server hears from the client."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from turnstile import __version__
from turnstile.errors import ConfigError, SandboxError
from turnstile.sandboxes.http.connection import Answer, Connection
from turnstile.sandboxes.http.wire import WIRE, GarbageError, part

BEATS = 4  # signs of life in the time of a lease


class Lease:
    """A lease, for use in the thread of `connection`.

    `lost` is the error that says why it is over; a new one can then be opened.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.client = secrets.token_hex(16)
        self.lost: SandboxError | None = None
        self._connection = connection
        self._name = name
        self._seconds = 0.0
        self._got: list[str] = []  # requests whose answers the server need not keep any longer
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        hello = {"client": self.client, "wire": WIRE, "turnstile": __version__, "run": self._name}
        answer, _ = await self._connection.post("open", hello)
        try:
            self._seconds = part(answer, "lease", float)
        except GarbageError as error:
            raise SandboxError(f"what is at {self._connection.url} is no sandbox server: {error}") from None
        self._beating = asyncio.create_task(self._beat())

    async def ask(
        self, verb: str, message: dict[str, Any], data: bytes = b"", *, identity: str | None = None
    ) -> Answer:
        """Return the answer to one request with its data, however long it takes.

        Cancelling this cancels the work at the server. Raises SandboxError if the lease is over or the server is
        silent, and any error that the server reports.
        """
        if self.lost is not None:
            raise self.lost
        identity = identity or secrets.token_hex(8)
        try:
            answer, found = await self._post("do", {**message, "verb": verb, "id": identity}, data)
            while "wait" in answer:
                answer, found = await self._post("wait", {"id": identity})
        except asyncio.CancelledError:
            if not self._connection.ending:
                await self._cancel(identity)
            raise
        finally:
            self._got.append(identity)
        return answer, found

    async def close(self) -> None:
        """Close everything that this client has at the server."""
        if self._beating is not None and self.lost is None:
            self._beating.cancel()
            await self._connection.post("close", {"client": self.client}, tries=2)
        self.lost = SandboxError("these sandboxes were closed")

    async def _post(self, path: str, message: dict[str, Any], data: bytes = b"", *, tries: int = 4) -> Answer:
        got, self._got = self._got, []
        answer, found = await self._connection.post(
            path, {**message, "client": self.client, "got": got}, data, tries=tries
        )
        if "gone" in answer:
            self.lost = SandboxError(
                f"the sandbox server at {self._connection.url} does not know this client any more, and has "
                f"closed its sandboxes: it was restarted, or did not hear of the client for {answer['gone']} s"
            )
            raise self.lost
        return answer, found

    async def _cancel(self, identity: str) -> None:
        """Cancel a request at the server. If the server cannot be reached, the request ends with the lease."""
        try:
            async with asyncio.timeout(self._connection.silence):
                while "wait" in (await self._post("cancel", {"id": identity}, tries=2))[0]:
                    pass
        except (SandboxError, ConfigError, TimeoutError):
            return

    async def _beat(self) -> None:
        pause = self._seconds / BEATS
        while self.lost is None:
            await asyncio.sleep(pause)
            try:
                async with asyncio.timeout(pause):
                    await self._post("beat", {}, tries=1)
            except (SandboxError, ConfigError, TimeoutError):
                continue  # the next one may get through; requests raise the error
