"""Time that a request loses to an engine that is not there, told to who waits for the request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Away:
    """What one request loses: each piece is given to `told` as it ends, with why and in seconds, until the request is
    over."""

    def __init__(self, told: Callable[[str, float], None]) -> None:
        self.told: Callable[[str, float], None] | None = told
        self._until = time.monotonic()

    def rest(self) -> float:
        """The seconds since it began, or since the last of what it lost."""
        return time.monotonic() - self._until

    def lost(self, why: str, since: float) -> None:
        """From `since`, of time.monotonic, to now it was not being answered. What was told before counts once."""
        if self.told is not None:
            now = time.monotonic()
            seconds, self._until = now - max(since, self._until), now
            self.told(why, seconds)


_HEARS: ContextVar[Away | None] = ContextVar("hears", default=None)


@contextmanager
def hearing(told: Callable[[str, float], None]) -> Iterator[Away]:
    """Within it `told` hears of the time that a request, made in this context, loses."""
    away = Away(told)
    token = _HEARS.set(away)
    try:
        yield away
    finally:
        away.told = None  # what several requests wait for may go on without this one
        _HEARS.reset(token)


def lost(why: str, since: float) -> None:
    """As `Away.lost`, of the request that is made in this context; nothing where nobody hears."""
    away = _HEARS.get()
    if away is not None:
        away.lost(why, since)


@contextmanager
def losing(why: str) -> Iterator[None]:
    """The time within it is lost, also where it is cut short."""
    since = time.monotonic()
    try:
        yield
    finally:
        lost(why, since)
