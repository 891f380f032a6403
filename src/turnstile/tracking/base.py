"""The protocol of trackers, which receive a run's metrics and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

Scalars = Mapping[str, float | int | str | bool | None]
"""The metrics of a step, by name."""


@runtime_checkable
class Tracker(Protocol):
    """Receives a run's metrics and messages. Metric names are slash-separated (`reward/total`, `seconds/generate`).

    The factory that is registered for a kind of tracker is called with the run's folder and the kind's knobs.
    """

    def log(self, step: int, metrics: Scalars) -> None:
        """Log the metrics of one finished step."""
        ...

    def say(self, line: str, *, level: str = "info") -> None:
        """Log one line for the user; `level` is "info", "warning" or "alarm"."""
        ...

    def progress(self, label: str, done: int, total: int) -> None:
        """Report the progress of a long phase, which begins with its first call and ends with `done >= total`."""
        ...

    def resume_at(self, step: int) -> None:
        """Drop everything logged after `step`, from which the run resumes; it will be logged again."""
        ...

    def sync(self) -> None:
        """Flush everything logged so far to the disk, so that it survives a crash of the machine."""
        ...

    def close(self) -> None:
        """Release files and threads."""
