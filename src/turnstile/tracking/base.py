"""Where a run's numbers go: one protocol of three methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

Scalars = Mapping[str, float | int | str | bool | None]


@runtime_checkable
class Tracker(Protocol):
    """Takes what a run reports. Names are slash-separated (`reward/total`, `seconds/generate`)."""

    def log(self, step: int, metrics: Scalars) -> None:
        """The metrics of one finished step."""
        ...

    def say(self, line: str, *, level: str = "info") -> None:
        """One line for a person; `level` is "info", "warning" or "alarm"."""
        ...

    def close(self) -> None: ...
