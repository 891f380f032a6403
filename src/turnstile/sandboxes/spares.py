"""Things that are slow to start and kept ready, by what they were made for."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

K = TypeVar("K")
M = TypeVar("M")
REMEMBERED = 8  # requests for each spare


class Spares(Generic[K, M]):
    """Up to `most` members of different kinds.

    A kind of which none is ready takes a place from the kind that was asked for longest ago, one a request, so that few
    kinds in turn share the places and a run of one takes them all. A kind that is not asked for any more loses its
    places to those that are. Members are made and ended by who keeps them.
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
        """Note that one of a kind is asked for; gives those that are to be ended, as they make room for others."""
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
        """The oldest of a kind; None where there is none."""
        for place, (known, member) in enumerate(self._ready):
            if known == kind:
                del self._ready[place]
                return member
        return None

    def _age(self, kind: K) -> int:
        """How many requests ago one of a kind was asked for; kinds need not be hashable."""
        return next(age for age, known in enumerate(reversed(self._asked)) if known == kind)

    def empty(self) -> list[M]:
        """Take all."""
        gone = [member for _, member in self._ready]
        self._ready.clear()
        return gone
