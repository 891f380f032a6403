"""Things that are slow to start and kept ready, by what they were made for."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

K = TypeVar("K")
M = TypeVar("M")
REMEMBERED = 8  # requests for each spare


class Spares(Generic[K, M]):
    """Up to `most` members of different kinds. Those of a kind that is not asked for any more make room for others.

    Members are made and ended by who keeps them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ready: deque[tuple[K, M]] = deque()
        self._asked: deque[K] = deque(maxlen=REMEMBERED * max(1, most))

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def missing(self) -> int:
        """How many more there is room for."""
        return self._most - len(self._ready)

    def put(self, kind: K, member: M) -> None:
        self._ready.append((kind, member))

    def ask(self, kind: K) -> list[M]:
        """Note that one of a kind is asked for; gives those that are to be ended, as nobody asks for theirs."""
        self._asked.append(kind)
        kept = deque((known, member) for known, member in self._ready if known in self._asked)
        gone = [member for known, member in self._ready if known not in self._asked]
        self._ready = kept
        return gone

    def take(self, kind: K) -> M | None:
        """The oldest of a kind; None where there is none."""
        for place, (known, member) in enumerate(self._ready):
            if known == kind:
                del self._ready[place]
                return member
        return None

    def empty(self) -> list[M]:
        """Take all."""
        gone = [member for _, member in self._ready]
        self._ready.clear()
        return gone
