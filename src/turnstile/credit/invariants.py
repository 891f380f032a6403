"""What every training signal must keep, and what came of looking: the words that all checkers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

INVARIANTS: Mapping[int, str] = {
    1: "inserting masked tokens between turns changes no action token's advantage, return or loss",
    2: "permuting the trajectories of a group permutes the result, nothing else",
    3: "packing, padding, sharing and splitting change no gradient",
    4: "a masked token and an infrastructure failure get no gradient and no share in a baseline",
    5: "a terminal reward that falls on an observation reaches the last action before it",
    6: "a turn of zero reward is still a turn",
    7: "all-equal rewards give exactly zero",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """A kind with knobs, and the invariants that cannot hold for it: number -> why."""

    kind: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    exempt: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What came of one invariant. `seen`: a counterexample, where it is broken; `why`: why it does not apply."""

    seen: str = ""
    why: str = ""


class DoesNotApply(Exception):  # noqa: N818 - no error: what was asked cannot be put to this function
    """Raised by an adapter for what its function has no words for; the text says why."""


Part = Callable[[], str | None]
"""Looks at one side of an invariant, and gives a counterexample or None."""


def examine(parts: Mapping[int, Sequence[Part]]) -> dict[int, Finding]:
    """Each invariant by all its sides: broken where one is, not applicable where none applies.

    What a function raises on a made-up input that it took in another shape before is a counterexample too.
    """
    return {number: _finding(sides) for number, sides in parts.items()}


def _finding(sides: Sequence[Part]) -> Finding:
    reasons = []
    for side in sides:
        try:
            seen = side()
        except DoesNotApply as reason:
            reasons.append(str(reason))
            continue
        except AssertionError as error:  # of a checker: the shape or a number of a result
            seen = str(error)
        except Exception as error:
            seen = f"raises {type(error).__name__}: {error}"
        if seen is not None:
            return Finding(seen=seen)
    return Finding(why=reasons[0]) if len(reasons) == len(sides) else Finding()


def broken(findings: Mapping[int, Finding]) -> dict[int, str]:
    """The broken ones alone: number -> what was seen."""
    return {number: finding.seen for number, finding in findings.items() if finding.seen}


def goes(before: float, after: float) -> str:
    """goes from 0.41 to 0.37, with as many digits as it takes to tell them apart."""
    digits = next((n for n in range(3, 17) if f"{before:.{n}g}" != f"{after:.{n}g}"), 17)
    return f"goes from {before:.{digits}g} to {after:.{digits}g}"


_Function = TypeVar("_Function", bound=Callable[..., Any])


def exempt(reasons: Mapping[int, str]) -> Callable[[_Function], _Function]:
    """Writes on a function which invariants cannot hold for it, and why; `exempt_of` reads it."""

    def mark(function: _Function) -> _Function:
        cast(Any, function).exempt = dict(reasons)
        return function

    return mark


def exempt_of(function: Callable[..., Any]) -> Mapping[int, str]:
    """What `exempt` wrote on a function; nothing where it did not."""
    return cast(Mapping[int, str], getattr(function, "exempt", {}))
