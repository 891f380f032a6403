"""A line between two processes, on which each sends the other messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

OnMessage = Callable[[Any], Any]
"""Is given a message in the thread that reads, as soon as it comes; `Line.receive` gives what it returns, unless that
is None."""

MAX_QUEUED = 256
"""Messages that wait to be written before a sender waits, which is more than training ever has."""


class Pipe:
    """One end of the line. What comes is taken off it by a thread, and what goes is written by another, so that nobody
    waits for one who computes, or who has only just begun."""

    def __init__(
        self,
        end: socket.socket,
        *,
        on_message: OnMessage = lambda message: message,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`at_end` is called in the thread that reads when the line is closed. What `hear` raises, `receive` gives."""
        self._socket = end
        self._on_message, self._on_close = on_message, on_close
        self._connection = Connection(os.dup(end.fileno()))
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()  # never more than what was asked for
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        self._loop = asyncio.get_running_loop()
        self._reader = threading.Thread(target=self._read, name="line, reading", daemon=True)
        self._writer = threading.Thread(target=self._write, name="line, writing", daemon=True)
        self._reader.start()
        self._writer.start()

    def send(self, message: Any) -> None:
        """Raises what pickle raises for what cannot be sent. Who is gone does not hear it; `receive` tells."""
        self._outgoing.put(pickle.dumps(message))

    def finish_sending(self) -> None:
        """Waits until what was sent is written. Nothing can be sent after it."""
        self._outgoing.put(None)
        self._writer.join()

    async def receive(self) -> Any:
        """What came next, or the exception that it could not be read for; None, again and again, when the line is
        closed."""
        found = await self._incoming.get()
        if found is None:
            self._incoming.put_nowait(None)
        return found

    async def pending(self) -> int:
        """How much there is for `receive` by now."""
        await asyncio.sleep(0)  # what came while nobody looked is put there by the loop
        return self._incoming.qsize()

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        self.finish_sending()
        self._reader.join()
        self._connection.close()
        self._socket.close()

    def _write(self) -> None:
        while (data := self._outgoing.get()) is not None:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(data)

    def _read(self) -> None:
        for data in self._raw_messages():
            try:
                found = self._on_message(pickle.loads(data))
            except Exception as error:  # whoever waits is told
                found = error
            if found is not None:
                self._deliver(found)
        self._on_close()
        self._deliver(None)

    def _raw_messages(self) -> Iterator[bytes]:
        while True:
            try:
                yield self._connection.recv_bytes()
            except (EOFError, OSError):
                return

    def _deliver(self, found: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._incoming.put_nowait, found)
