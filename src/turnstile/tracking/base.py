"""Where a run's numbers go: one protocol of six methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

Scalars = Mapping[str, float | int | str | bool | None]


@runtime_checkable
class Tracker(Protocol):
    """Takes what a run reports. Names are slash-separated (`reward/total`, `seconds/generate`).

    A tracker's kind is called with the run's folder and its knobs.
    """

    def log(self, step: int, metrics: Scalars) -> None:
        """The metrics of one finished step."""
        ...

    def say(self, line: str, *, level: str = "info") -> None:
        """One line for a person; `level` is "info", "warning" or "alarm"."""
        ...

    def progress(self, label: str, done: int, total: int) -> None:
        """How far a long phase is; it begins with its first call and ends with `done >= total`."""
        ...

    def resume_at(self, step: int) -> None:
        """The run goes on after `step`: what was logged of later steps will come again and is dropped."""
        ...

    def sync(self) -> None:
        """What was logged so far outlives a machine that stops now: it is on the disk when this returns."""
        ...

    def close(self) -> None: ...
