"""Report the time that a request loses to an unreachable or busy server to the code that awaits the request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class DowntimeTracker:
    """Tracks the time that one request loses.

    Each interval is passed to `report` (reason, seconds) when it ends, until the request is over.
    """

    def __init__(self, report: Callable[[str, float], None]) -> None:
        self.report: Callable[[str, float], None] | None = report
        self._counted_until = time.monotonic()

    def since_last(self) -> float:
        """Return the seconds since the start or the end of the last reported interval."""
        return time.monotonic() - self._counted_until

    def record_downtime(self, why: str, since: float) -> None:
        """Report that the request made no progress from `since`, a time of `time.monotonic`, to now.

        Time that was reported before is not counted again.
        """
        if self.report is not None:
            now = time.monotonic()
            seconds, self._counted_until = now - max(since, self._counted_until), now
            self.report(why, seconds)


_TRACKER: ContextVar[DowntimeTracker | None] = ContextVar("downtime", default=None)


@contextmanager
def report_downtime(report: Callable[[str, float], None]) -> Iterator[DowntimeTracker]:
    """Call `report` (reason, seconds) for each interval that requests made in this context lose."""
    tracker = DowntimeTracker(report)
    token = _TRACKER.set(tracker)
    try:
        yield tracker
    finally:
        tracker.report = None  # a task that other requests share may outlive this one
        _TRACKER.reset(token)


def record_downtime(why: str, since: float) -> None:
    """Record downtime as `DowntimeTracker.record_downtime` does, if the current context reports it."""
    tracker = _TRACKER.get()
    if tracker is not None:
        tracker.record_downtime(why, since)


@contextmanager
def track_downtime(why: str) -> Iterator[None]:
    """Record the time spent inside as downtime, even if it is cancelled."""
    since = time.monotonic()
    try:
        yield
    finally:
        record_downtime(why, since)
