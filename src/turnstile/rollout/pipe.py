"""A pipe between two processes, over which each sends messages to the other."""

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
"""Called with each message in the reading thread, as soon as it arrives.

`Pipe.receive` returns its result, unless that is None.
"""

MAX_QUEUED = 256
"""Number of unwritten messages at which a sender waits, more than training ever queues."""


class Pipe:
    """One end of the pipe.

    One thread reads and another writes, so neither process waits while the other is computing or starting.
    """

    def __init__(
        self,
        end: socket.socket,
        *,
        on_message: OnMessage = lambda message: message,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the threads. Requires a running event loop.

        The reading thread calls `on_close` when the pipe is closed. An exception raised by `on_message` is returned by
        `receive`.
        """
        self._socket = end
        self._on_message, self._on_close = on_message, on_close
        self._connection = Connection(os.dup(end.fileno()))
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()  # bounded by the requests in flight
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        self._loop = asyncio.get_running_loop()
        self._reader = threading.Thread(target=self._read, name="pipe reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="pipe writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def send(self, message: Any) -> None:
        """Queue a message, waiting if the queue is full. Raises what pickle raises if the message cannot be pickled.

        If the other end is gone, the message is lost; `receive` then reports that the pipe is closed.
        """
        self._outgoing.put(pickle.dumps(message))

    def finish_sending(self) -> None:
        """Wait until all queued messages are written. Messages sent afterwards are never written."""
        self._outgoing.put(None)
        self._writer.join()

    async def receive(self) -> Any:
        """Return the next message, or the exception raised while reading it. Always None once the pipe is closed."""
        message = await self._incoming.get()
        if message is None:
            self._incoming.put_nowait(None)
        return message

    async def pending(self) -> int:
        """Return how many messages `receive` returns without waiting."""
        await asyncio.sleep(0)  # let the loop queue what arrived while it was blocked
        return self._incoming.qsize()

    def shutdown(self) -> None:
        """Close the connection for both ends. The threads keep running until `close`."""
        with contextlib.suppress(OSError):  # the other end closed first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and join both threads."""
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
                message = self._on_message(pickle.loads(data))
            except Exception as error:  # `receive` returns it
                message = error
            if message is not None:
                self._deliver(message)
        self._on_close()
        self._deliver(None)

    def _raw_messages(self) -> Iterator[bytes]:
        while True:
            try:
                yield self._connection.recv_bytes()
            except (EOFError, OSError):
                return

    def _deliver(self, message: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing is waiting
            self._loop.call_soon_threadsafe(self._incoming.put_nowait, message)
