"""The signals of a turn in which an agent works on code, in the form that `rewards.steps` reads."""

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
    """Return the signals to record for one command; `reason` says why it did not succeed."""
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
    """Return the answer to a command that did not succeed, for the given reason."""
    return Done(say=say, signals=signals(command, False, reason, **found))


def merge_signals(one: Mapping[str, JSON], other: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the signals of a turn's calls so far (`one`) combined with those of its next call (`other`).

    The turn succeeds if all its calls do. Whatever any call saw, ran or changed counts, and the last test result and
    the first reason are kept.
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
