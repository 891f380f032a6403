"""Truncation of long output to its head and tail."""

from __future__ import annotations

import codecs
from collections import deque


class Cut:
    """The head and the tail of a text that arrives as bytes, at most `limit` characters together.

    The number of characters left out is counted.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.head: list[str] = []
        self.head_left = limit // 2
        self.tail: deque[str] = deque()
        self.tail_length = 0
        self.dropped = 0

    def feed(self, data: bytes, final: bool = False) -> None:
        text = self.decoder.decode(data, final)
        if self.head_left and text:
            self.head.append(text[: self.head_left])
            text = text[self.head_left :]
            self.head_left -= len(self.head[-1])
        if text:
            self.tail.append(text)
            self.tail_length += len(text)
        room = self.limit - self.limit // 2
        while self.tail and self.tail_length - len(self.tail[0]) >= room:
            gone = len(self.tail.popleft())
            self.tail_length -= gone
            self.dropped += gone

    def text(self) -> str:
        self.feed(b"", final=True)
        head, tail = "".join(self.head), "".join(self.tail)
        surplus = max(0, len(tail) - (self.limit - self.limit // 2))
        left_out = self.dropped + surplus
        return f"{head}\n[... {left_out} characters left out ...]\n{tail[surplus:]}" if left_out else head + tail
