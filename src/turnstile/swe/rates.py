"""Tell whether a repair was submitted, changed something, and is right; each of these implies the one before."""

from __future__ import annotations

from turnstile.envs.base import Rates
from turnstile.types import Stop, Trajectory


def completed(trajectory: Trajectory) -> bool:
    """Return whether the agent submitted; without that signal, whether the task came to its own end."""
    return bool(trajectory.signals.get("submitted", trajectory.stop in (Stop.SUBMITTED, Stop.DONE)))


def modified(trajectory: Trajectory) -> bool:
    """Return whether the agent submitted a non-empty non-test diff; without that signal, any submission counts."""
    return completed(trajectory) and bool(trajectory.signals.get("modified", True))


def resolved(trajectory: Trajectory) -> bool:
    """Return whether the agent submitted a change with which all required tests pass (the signal `resolved`)."""
    return modified(trajectory) and bool(trajectory.signals.get("resolved", False))


RATES: Rates = {"completion": completed, "modification": modified, "resolution": resolved}
