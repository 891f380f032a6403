"""The signals of a turn in which an agent works on code, as `rewards.steps` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turnstile.types import JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The answer to one command, and its signals."""

    say: str
    signals: Mapping[str, JSON]


def signals(command: str, succeeded: bool, reason: str = "", **overrides: JSON) -> Mapping[str, JSON]:
    """Return the signals that are recorded for one command; `reason` says why it did not succeed."""
    return {
        "parsed": bool(command),
        "command": command,
        "succeeded": succeeded,
        "reason": reason,
        "looked_at_failing_code": False,
        "ran_tests": False,
        "tests_passed": None,
        "modified": False,
        **overrides,
    }


def done(command: str, say: str, **found: JSON) -> Done:
    """Return the answer to a command that succeeded."""
    return Done(say=say, signals=signals(command, True, **found))


def failed(command: str, say: str, reason: str, **found: JSON) -> Done:
    """Return the answer to a command that failed for `reason`."""
    return Done(say=say, signals=signals(command, False, reason, **found))


def merge_signals(one: Mapping[str, JSON], other: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the signals of a turn with several calls.

    All calls must succeed, anything seen or done counts, and the last test run and the first reason are kept.
    """
    if not one:
        return dict(other)
    result = {name: bool(one[name] or other[name]) for name in ("looked_at_failing_code", "ran_tests", "modified")}
    return {
        **one,
        **result,
        "command": f"{one['command']}+{other['command']}",
        "succeeded": one["succeeded"] and other["succeeded"],
        "reason": one["reason"] or other["reason"],
        "tests_passed": one["tests_passed"] if other["tests_passed"] is None else other["tests_passed"],
    }
