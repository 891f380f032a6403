"""The progress of a long phase, and an estimate of the time left at its pace so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Phase:
    """A running phase. Times are in seconds of the monotonic clock."""

    began: float
    done_at_start: int
    printed_at: float
    done: int = 0
    total: int = 0
    updated_at: float = 0.0  # when `done` was last updated

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds left at the pace so far, or None before any progress."""
        paced = self.done - self.done_at_start
        if paced <= 0:
            return None
        ahead = (self.updated_at - self.began) / paced * (self.total - self.done)
        return max(0.0, ahead - (now - self.updated_at))


def format_time_left(seconds: float | None) -> str:
    """Return the time left as a phrase. None means that it is unknown."""
    return "time left unknown yet" if seconds is None else f"{duration(seconds)} left"


def duration(seconds: float) -> str:
    """Return seconds in a readable form: 42 s, 3:05 min, 2:07 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"
