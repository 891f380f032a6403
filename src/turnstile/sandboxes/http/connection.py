"""The connection to a sandbox server, which sends HTTP requests from its own thread.

The thread keeps a lease alive while its owner's event loop is busy, or between two event loops, and has one connection
pool for all of them.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import IO, Any, TypeVar

from turnstile.errors import ConfigError, MissingExtraError, SandboxError
from turnstile.sandboxes.containers.runner.frames import CHUNK
from turnstile.sandboxes.http.wire import POLL, GarbageError, frame, raise_error, unframe

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise MissingExtraError("sandbox kind 'remote'", "remote") from error

T = TypeVar("T")
Answer = tuple[dict[str, Any], bytes]
PAUSES = (0.1, 0.4, 1.5)  # seconds before each repetition of a request
SLOW = 1 << 20  # bytes per second that any network should carry
CONNECT = 10.0  # seconds
BUSY = (502, 503, 504)  # statuses that a proxy returns while the server behind it restarts
ENDING = 10.0  # seconds to tell the server that the client is leaving


class Connection:
    """A connection to the server at `url` with `token`.

    A request fails if the server is silent for `patience` seconds longer than an answer may take. `farewell` is awaited
    when the connection closes.
    """

    def __init__(self, url: str, token: str, *, patience: float) -> None:
        self.url = url.rstrip("/")
        self.silence = POLL + patience  # seconds of silence after which a request fails
        self.farewell: Callable[[], Awaitable[object]] | None = None
        self.ending = False
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/octet-stream"}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="turnstile-remote", daemon=True)
        self._door = threading.Lock()
        self._http: aiohttp.ClientSession | None = None
        self._closed = False
        self._pid = os.getpid()

    async def run(self, job: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None) -> T:
        """Run `job` in the connection's thread and return its result.

        Cancelling the caller cancels the job and waits for its end. If the job has finished by then, its result, which
        the caller will not receive, is passed to `undo`. Raises SandboxError if the connection is closed.
        """
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(job))
            tasks[0].add_done_callback(lambda task: settle(task, done))

        with self._door:
            if self._closed:
                job.close()
                raise SandboxError("these sandboxes were closed")
            if not self._thread.is_alive():
                self._thread.start()
            self._loop.call_soon_threadsafe(begin)
        waiting = asyncio.wrap_future(done)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not waiting.done():
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                await asyncio.wait([waiting])
            if waiting.cancelled():
                raise
            if waiting.exception() is None and undo is not None:
                undone = asyncio.run_coroutine_threadsafe(undo(waiting.result()), self._loop)
                await asyncio.wait([asyncio.wrap_future(undone)])
            raise

    async def post(self, path: str, message: Mapping[str, Any], data: bytes = b"", *, tries: int = 4) -> Answer:
        """Send one request and return its answer. May be awaited only in a job of `run`.

        The request is sent again if no answer comes, so it must be idempotent. Raises SandboxError if no sandbox server
        answers, ConfigError if the server refuses the client, and the error that the answer reports.
        """
        body = frame(message, data)
        return self._read(*await self._send("POST", path, io.BytesIO(body), len(body), tries))

    async def put(self, path: str, file: IO[bytes]) -> None:
        """Send a file. May be awaited only in a job of `run`. Raises the same errors as `post`."""
        self._read(*await self._send("PUT", path, file, file.seek(0, os.SEEK_END), 4))

    def close(self) -> None:
        """Await `farewell`, and end running jobs with SandboxError.

        Blocks until that is done; closing twice does nothing.
        """
        if os.getpid() != self._pid:
            return  # in a fork of its process, which lacks the thread
        with self._door:
            closed, self._closed = self._closed, True
        if closed:
            return
        if not self._thread.is_alive():
            self._loop.close()
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if threading.current_thread() is not self._thread:  # garbage collection may call this there
            self._thread.join()

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        try:
            if self.farewell is not None:
                async with asyncio.timeout(ENDING):
                    await self.farewell()
        except (SandboxError, ConfigError, TimeoutError):
            pass  # the server closes everything when the lease expires
        finally:
            self.ending = True
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if self._http is not None:
                await self._http.close()
            self._loop.stop()

    async def _send(self, method: str, path: str, body: IO[bytes], size: int, tries: int) -> tuple[int, bytes]:
        """Send a request, again if it gets no answer, and return the answer's status and body."""
        pauses = PAUSES[: tries - 1]
        while True:
            body.seek(0)
            try:
                return await self._exchange(method, path, body, size)
            except TimeoutError:
                pauses = pauses[2:]  # the wait itself took long enough
                why = "does not answer in time"
            except (aiohttp.ClientError, OSError) as error:
                why = f"does not answer ({error or type(error).__name__})"
            if not pauses:
                raise SandboxError(f"the sandbox server at {self.url} {why}; is it running, and the way to it open?")
            await asyncio.sleep(pauses[0])
            pauses = pauses[1:]

    async def _exchange(self, method: str, path: str, body: IO[bytes], size: int) -> tuple[int, bytes]:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
            self._http = aiohttp.ClientSession(connector=connector, headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=self.silence + size / SLOW)
        asking = self._http.request(
            method,
            f"{self.url}/{path}",
            data=body.read() if size <= CHUNK else pieces(body),
            headers={"Content-Length": str(size)},
            timeout=timeout,
            allow_redirects=False,
        )
        async with asking as answer:
            found = await answer.read()
            if answer.status in BUSY:
                raise aiohttp.ClientConnectionError(f"{answer.status} {answer.reason}")
            return answer.status, found

    def _read(self, status: int, found: bytes) -> Answer:
        if status == 401:
            raise ConfigError(f"the sandbox server at {self.url} does not take this token; give it the server's own")
        if status == 413:
            raise OSError(errno.EFBIG, f"more than the sandbox server at {self.url} takes at once (its --most-mb)")
        try:
            if status != 200:
                raise GarbageError(f"status {status}, {found[:200].decode(errors='replace').strip()!r}")
            message, data = unframe(found)
            raise_error(message)
        except GarbageError as error:
            raise SandboxError(f"what is at {self.url} does not answer as a sandbox server does: {error}") from None
        return message, data


async def pieces(body: IO[bytes]) -> AsyncIterator[bytes]:
    """Yield a file's bytes in pieces."""
    while data := body.read(CHUNK):
        yield data


def settle(task: asyncio.Task[T], done: Future[T]) -> None:
    """Give a future the result or error of a finished task.

    A task that was cancelled fails with SandboxError, since the sandbox was closed.
    """
    if task.cancelled():
        done.set_exception(SandboxError("the sandbox was closed while it was in use"))
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())
