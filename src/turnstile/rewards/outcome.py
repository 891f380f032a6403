"""Outcome classes for software repair: one number for how far the episode came."""

from __future__ import annotations

from turnstile.errors import ConfigError
from turnstile.rewards.recorded import episode_signal
from turnstile.types import Stop, Task, Trajectory


def outcome_class(
    task: Task,
    trajectory: Trajectory,
    *,
    no_submit: float = -0.5,
    empty_patch: float = -0.2,
    fail: float = 0.0,
    passed: float = 1.0,
) -> float | None:
    """The terminal reward of a repair: no_submit <= empty_patch <= fail <= passed (arXiv 2508.10548 ranks them so).

    An episode that never submitted is `no_submit` whatever it changed; a submission whose non-test diff is
    empty is `empty_patch`; `passed` means that every test that must pass does. None where infrastructure
    failed (`Stop.ERROR`, or a verdict that could not be had): that is never one of the four classes.

    Reads the episode's signals submitted, modified, resolved. Raises ConfigError where one is missing, or
    where the four values are out of order.
    """
    if not no_submit <= empty_patch <= fail <= passed:
        raise ConfigError(
            f"outcome_class wants no_submit <= empty_patch <= fail <= passed, got {no_submit}, {empty_patch}, "
            f"{fail}, {passed}"
        )
    if trajectory.stop is Stop.ERROR:
        return None
    if not episode_signal(trajectory, "submitted", "outcome_class"):
        return no_submit
    if not episode_signal(trajectory, "modified", "outcome_class"):
        return empty_patch
    resolved = episode_signal(trajectory, "resolved", "outcome_class")
    if resolved is None:
        return None
    return passed if resolved else fail
