"""Frames of requests and answers over standard input and output.

A frame is the length of its JSON (4 bytes) and of its data (8 bytes), both big-endian, and then the JSON and the data.
"""

from __future__ import annotations

import json
import os
import struct

TYPE_CHECKING = False  # importing typing would take a tenth of a start
if TYPE_CHECKING:
    from typing import Any


HEAD = struct.Struct(">IQ")
CHUNK = 1 << 20
PIECE = 1 << 16  # bytes to read when few are expected; memory for more would be mapped anew each time


class Input:
    """Standard input, read as it arrives. Reading raises EOFError at its end."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.buffer = b""

    def some(self, count: int) -> bytes:
        """Return at least one byte and at most `count` bytes."""
        if not self.buffer:
            self.buffer = os.read(self.descriptor, CHUNK if count > PIECE else PIECE)
            if not self.buffer:
                raise EOFError
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data

    def exactly(self, count: int) -> bytes:
        parts = []
        while count:
            parts.append(self.some(count))
            count -= len(parts[-1])
        return b"".join(parts)


class Data:
    """The data of one frame, with the `read` method of a file."""

    def __init__(self, source: Input, size: int) -> None:
        self.source = source
        self.left = size

    def read(self, count: int = -1) -> bytes:
        count = self.left if count < 0 else min(count, self.left)
        data = self.source.exactly(count)
        self.left -= count
        return data

    def skip(self) -> None:
        while self.left:
            self.left -= len(self.source.some(self.left))


def send(answer: dict[str, Any], data: bytes = b"") -> None:
    """Send an answer with its data."""
    body = json.dumps(answer).encode()
    put(HEAD.pack(len(body), len(data)) + body + data)


def put(data: bytes) -> None:
    """Write all of `data` to standard output."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
