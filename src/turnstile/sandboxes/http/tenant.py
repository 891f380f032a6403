"""A client of a sandbox server, with its provider, its sandboxes and its requests."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from turnstile.errors import SandboxError, TurnstileError
from turnstile.sandboxes.base import Image, Limits, Sandbox, Sandboxes, Template
from turnstile.sandboxes.http.uploads import UnknownUploadError, Uploads
from turnstile.sandboxes.http.wire import KEPT, POLL, GarbageError, error_message, frame, part

_log = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], bytes]
STUBBORN = 60.0  # seconds within which running requests should end when their client goes
CHARS = 100_000_000  # the largest output_chars that a client may set


class Tenant:
    """A client whose commands, sandboxes and snapshots end when it is closed.

    The client chooses the ids of requests. A repeated request is not executed again, but gets the answer to the first.
    A request that was cancelled before it arrived is never executed.
    """

    def __init__(self, name: str, provider: Sandboxes, uploads: Uploads, *, most: int) -> None:
        self.name = name
        self._provider = provider
        self._uploads = uploads
        self._most = most  # bytes of an answer
        self._sandboxes: dict[str, Sandbox] = {}
        self._snapshots: dict[str, Template] = {}
        self._jobs: dict[str, asyncio.Task[bytes] | None] = {}  # None: answer received, or cancelled before it arrived
        self._closed = False

    def begin(self, message: Mapping[str, Any], data: bytes) -> asyncio.Task[bytes]:
        """Return the task of a request, and start it if the request is new.

        Raises SandboxError if the client is closed or the request was answered or cancelled, and GarbageError if the
        request is invalid.
        """
        identity = part(message, "id", str)
        self.forget_received(message)
        if self._closed:
            raise SandboxError("the sandbox server has closed this client's sandboxes")
        if identity not in self._jobs:
            verb = _VERBS.get(part(message, "verb", str))
            if verb is None:
                raise GarbageError(f"there is no verb {message['verb']!r:.40}")
            self._remember(identity, asyncio.ensure_future(self._carry_out(verb, message, data)))
        return self.job(identity)

    def job(self, identity: str) -> asyncio.Task[bytes]:
        """Return the task of an earlier request.

        Raises SandboxError if the request is not known, or was answered or cancelled.
        """
        found = self._jobs.get(identity)
        if found is None:
            raise SandboxError("the sandbox server knows no such request, or has answered or cancelled it before")
        return found

    def forget_received(self, message: Mapping[str, Any]) -> None:
        """Drop the answers that `message` acknowledges."""
        for identity in words(message, "got"):
            job = self._jobs.get(identity)
            if job is not None and job.done():
                self._jobs[identity] = None

    async def cancel(self, identity: str) -> bool:
        """Cancel a request and return whether it has ended. If so, close the sandbox that it started, if any."""
        job = self._jobs.get(identity)
        if job is None:
            self._remember(identity, None)
        else:
            end(job)
            await asyncio.wait([job], timeout=POLL)
            if not job.done():
                return False
        await self._close_sandbox(identity)
        return True

    async def close(self) -> None:
        """End everything that belongs to the client. Never raises an error: what cannot be ended is logged."""
        self._closed = True
        running = [job for job in self._jobs.values() if job is not None and not job.done()]
        for job in running:
            end(job)
        if running:
            await asyncio.wait(running, timeout=STUBBORN)
        self._jobs.clear()
        try:
            await self._provider.close()
        except Exception as error:  # other clients' sandboxes must still be closed
            expected = isinstance(error, TurnstileError | OSError)
            _log.warning(
                "client %s: its sandboxes may not be closed: %s", self.name, error, exc_info=None if expected else error
            )

    def _remember(self, identity: str, job: asyncio.Task[bytes] | None) -> None:
        """Keep a request while it runs, and after that for as long as it may be repeated."""
        self._jobs[identity] = job
        loop = asyncio.get_running_loop()
        if job is None:
            loop.call_later(KEPT, self._jobs.pop, identity, None)
        else:
            job.add_done_callback(lambda _: loop.call_later(KEPT, self._jobs.pop, identity, None))

    async def _carry_out(self, verb: Verb, message: Mapping[str, Any], data: bytes) -> bytes:
        try:
            answer, found = await verb(self, message, data)
            if len(found) > self._most:
                raise OSError(errno.EFBIG, f"more than the {self._most >> 20} MiB that a sandbox server sends at once")
            return frame(answer, found)
        except UnknownUploadError:
            return frame({"unknown": True})
        except Exception as error:  # the client raises it
            if not isinstance(error, TurnstileError | OSError | ValueError):
                _log.exception("client %s: %s failed", self.name, message["verb"])
            return frame(error_message(error))

    async def _start(self, message: Mapping[str, Any], data: bytes) -> Answer:
        identity = part(message, "id", str)
        given = part(message, "template", dict)
        deps = (
            None if message.get("deps") is None else Path(part(message, "deps", str))
        )  # the provider may know it or not
        if "tree" in given:
            async with self._uploads.held(part(given, "tree", str)) as folder:
                sandbox = await self._provider.start(folder, deps=deps)
        elif "snapshot" in given:
            snapshot = self._snapshots.get(part(given, "snapshot", str))
            if snapshot is None:
                raise SandboxError("the sandbox server has no such snapshot of this client")
            root = part(given, "root", str)
            if isinstance(snapshot, Image) and root:  # the client may choose where commands run
                snapshot = replace(snapshot, root=root)
            sandbox = await self._provider.start(snapshot, deps=deps)
        else:
            image = Image(name=part(given, "image", str), root=part(given, "root", str))
            sandbox = await self._provider.start(image, deps=deps)
        self._sandboxes[identity] = sandbox
        return {}, b""

    async def _exec(self, message: Mapping[str, Any], data: bytes) -> Answer:
        argv, env = words(message, "argv"), part(message, "env", dict)
        limits = None if message.get("limits") is None else read_limits(part(message, "limits", dict))
        if not all(isinstance(value, str) for value in env.values()):
            raise GarbageError("env has a value that is no string")
        return {"result": asdict(await self._sandbox(message).exec(argv, limits=limits, env=env))}, b""

    async def _read(self, message: Mapping[str, Any], data: bytes) -> Answer:
        return {}, await self._sandbox(message).read(part(message, "path", str))

    async def _write(self, message: Mapping[str, Any], data: bytes) -> Answer:
        await self._sandbox(message).write(part(message, "path", str), data)
        return {}, b""

    async def _snapshot(self, message: Mapping[str, Any], data: bytes) -> Answer:
        self._snapshots[part(message, "id", str)] = await self._sandbox(message).snapshot()
        return {}, b""

    async def _close(self, message: Mapping[str, Any], data: bytes) -> Answer:
        await self._close_sandbox(part(message, "sandbox", str))
        return {}, b""

    async def _close_sandbox(self, identity: str) -> None:
        sandbox = self._sandboxes.pop(identity, None)
        if sandbox is not None:
            await sandbox.close()

    def _sandbox(self, message: Mapping[str, Any]) -> Sandbox:
        sandbox = self._sandboxes.get(part(message, "sandbox", str))
        if sandbox is None:
            raise SandboxError("the sandbox was closed")
        return sandbox


Verb = Callable[[Tenant, Mapping[str, Any], bytes], Awaitable[Answer]]
_VERBS: Mapping[str, Verb] = {
    "start": Tenant._start,
    "exec": Tenant._exec,
    "read": Tenant._read,
    "write": Tenant._write,
    "snapshot": Tenant._snapshot,
    "close": Tenant._close,
}


def end(job: asyncio.Task[bytes]) -> None:
    """Cancel a task, but only once, since a second cancellation would interrupt the clean-up of the first."""
    if not job.cancelling():
        job.cancel()


def words(message: Mapping[str, Any], name: str) -> list[str]:
    """Return a field of a request that is a list of strings. Raises GarbageError if it is anything else."""
    found = part(message, name, list)
    if not all(isinstance(word, str) for word in found):
        raise GarbageError(f"{name} has a word that is no string")
    return found


def read_limits(message: Mapping[str, Any]) -> Limits:
    """Return the limits of a request. Raises GarbageError if they are invalid."""
    wanted = asdict(Limits())
    if message.keys() != wanted.keys() or not all(type(value) in (int, float) for value in message.values()):
        raise GarbageError(f"no limits of a command: {message!r:.200}")
    if message["output_chars"] > CHARS:
        raise GarbageError(f"output_chars may be at most {CHARS}")
    return Limits(**message)


def name_of(message: Mapping[str, Any]) -> str:
    """Return the name that a client gives itself, in characters that may be logged."""
    return "".join(letter for letter in str(message.get("run") or "")[:80] if letter.isprintable()) or "no name"
