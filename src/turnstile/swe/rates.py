"""Whether a repair was handed in, changed something, and is right: each rate is a subset of the one before."""

from __future__ import annotations

from turnstile.envs.base import Rates
from turnstile.types import Stop, Trajectory


def completed(trajectory: Trajectory) -> bool:
    """Tell whether the agent submitted; without such a signal, whether the task came to its own end."""
    return bool(trajectory.signals.get("submitted", trajectory.stop in (Stop.SUBMITTED, Stop.DONE)))


def modified(trajectory: Trajectory) -> bool:
    """Tell whether the agent submitted a non-test diff that is not empty; without such a signal, any submission."""
    return completed(trajectory) and bool(trajectory.signals.get("modified", True))


def resolved(trajectory: Trajectory) -> bool:
    """Tell whether the agent submitted a change after which every test passes that must (the signal `resolved`)."""
    return modified(trajectory) and bool(trajectory.signals.get("resolved", False))


RATES: Rates = {"completion": completed, "modification": modified, "resolution": resolved}
