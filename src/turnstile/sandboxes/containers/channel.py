"""Frames exchanged with a container's runner, over the stream attached to the container's first process."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from typing import IO, Any

from turnstile.sandboxes.containers.runner.frames import CHUNK, HEAD, PIECE

STDERR = 2
SAID = 4096  # bytes of the runner's standard error that are kept


class ChannelClosedError(Exception):
    """Raised when the other end has closed the stream."""


class Channel:
    """A stream of requests, each followed by its answers. `stderr_end` is the end of the runner's standard error.

    Without a terminal, the engine puts eight bytes before each piece of output: the first names the stream, and the
    last four are the length (big-endian). The channel is bound to no event loop.
    """

    def __init__(self, attached: socket.socket) -> None:
        self._socket = attached
        self._is_blocking = not isinstance(attached, socket.socket) or isinstance(attached, ssl.SSLSocket)
        self._raw = bytearray()
        self._stream = 0
        self._left = 0
        self._bytes = bytearray()
        self.stderr_end = b""

    async def send(self, request: dict[str, Any], data: IO[bytes] | None = None) -> None:
        """Send a request and the whole content of `data`. Raises ChannelClosedError if the other end has closed."""
        body = json.dumps(request).encode()
        size = 0
        if data is not None:
            size = data.seek(0, os.SEEK_END)
            data.seek(0)
        try:
            await self._send(HEAD.pack(len(body), size) + body)
            while data is not None and size:
                part = data.read(min(CHUNK, size))
                size -= len(part)
                await self._send(part)
        except OSError:
            raise ChannelClosedError from None

    async def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next answer with its data. Raises ChannelClosedError if the other end has closed."""
        size, data_size = HEAD.unpack(await self._take(HEAD.size))
        answer: dict[str, Any] = json.loads(await self._take(size))
        return answer, await self._take(data_size)

    def shut(self) -> None:
        """Shut the stream down: the runner exits, and a caller waiting for an answer gets ChannelClosedError."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end has already closed it

    def close(self) -> None:
        self._socket.close()

    async def _send(self, data: bytes) -> None:
        if self._is_blocking:  # an event loop cannot wait for it
            await asyncio.to_thread(self._socket.sendall, data)
        else:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def _take(self, count: int) -> bytes:
        size = CHUNK if count > PIECE else PIECE
        while len(self._bytes) < count:
            try:
                if self._is_blocking:  # an event loop cannot wait for it
                    data = await asyncio.to_thread(self._socket.recv, size)
                else:
                    data = await asyncio.get_running_loop().sock_recv(self._socket, size)
            except OSError:
                raise ChannelClosedError from None
            if not data:
                raise ChannelClosedError
            self._separate(data)
        found = bytes(self._bytes[:count])
        del self._bytes[:count]
        return found

    def _separate(self, data: bytes) -> None:
        self._raw += data
        while self._raw:
            if self._left == 0:
                if len(self._raw) < 8:
                    return
                self._stream, self._left = self._raw[0], int.from_bytes(self._raw[4:8], "big")
                del self._raw[:8]
            part = bytes(self._raw[: self._left])
            del self._raw[: len(part)]
            self._left -= len(part)
            if self._stream == STDERR:
                self.stderr_end = (self.stderr_end + part)[-SAID:]
            else:
                self._bytes += part
