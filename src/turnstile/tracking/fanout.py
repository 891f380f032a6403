"""A tracker that forwards to other trackers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from turnstile.tracking.base import Scalars, Tracker


class Trackers:
    """Forwards every report to each tracker in turn."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, step: int, metrics: Scalars) -> None:
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def say(self, line: str, *, level: str = "info") -> None:
        for tracker in self.trackers:
            tracker.say(line, level=level)

    def progress(self, label: str, done: int, total: int) -> None:
        for tracker in self.trackers:
            tracker.progress(label, done, total)

    def resume_at(self, step: int) -> None:
        for tracker in self.trackers:
            tracker.resume_at(step)

    def sync(self) -> None:
        for tracker in self.trackers:
            tracker.sync()

    def close(self) -> None:
        """Close all trackers, even if one of them raises."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close)
