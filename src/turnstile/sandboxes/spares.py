"""Spare resources of several kinds that are kept ready."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

K = TypeVar("K")
M = TypeVar("M")
REMEMBERED = 8  # requests remembered per spare


class Spares(Generic[K, M]):
    """At most `most` spare members of different kinds.

    A request for a kind without a ready member frees a place of the kind requested longest ago, so that a few
    alternating kinds share the places and repeated requests for one kind take them all. Kinds that are no longer
    requested lose their places. The owner starts and ends members.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ready: deque[tuple[K, M]] = deque()
        self._asked: deque[K] = deque(maxlen=REMEMBERED * max(1, most))

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def missing(self) -> int:
        """The number of members that still fit."""
        return self._most - len(self._ready)

    def put(self, kind: K, member: M) -> None:
        self._ready.append((kind, member))

    def ask(self, kind: K) -> list[M]:
        """Record a request for a kind, and return the members that must be ended to make room."""
        self._asked.append(kind)
        kept = deque((known, member) for known, member in self._ready if known in self._asked)
        gone = [member for known, member in self._ready if known not in self._asked]
        self._ready = kept
        if kept and self.missing <= 0 and all(known != kind for known, _ in kept):
            oldest = max(range(len(kept)), key=lambda place: self._age(kept[place][0]))
            gone.append(kept[oldest][1])
            del kept[oldest]
        return gone

    def take(self, kind: K) -> M | None:
        """Remove and return the oldest member of a kind, or return None if there is none."""
        for place, (known, member) in enumerate(self._ready):
            if known == kind:
                del self._ready[place]
                return member
        return None

    def _age(self, kind: K) -> int:
        """Return how many requests ago a kind was last requested. Kinds need not be hashable."""
        return next(age for age, known in enumerate(reversed(self._asked)) if known == kind)

    def empty(self) -> list[M]:
        """Remove and return all members."""
        gone = [member for _, member in self._ready]
        self._ready.clear()
        return gone
