"""The invariants that every training signal must keep, and the form of findings that all checkers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from turnstile.lookup import KINDS, resolve

INVARIANTS: Mapping[int, str] = {
    1: "inserting masked tokens between turns changes no action token's advantage, return or loss",
    2: "permuting the trajectories of a group permutes the result, nothing else",
    3: "packing, padding, sharing and splitting change no gradient",
    4: "a masked token and an infrastructure failure get no gradient and no share in a baseline",
    5: "a terminal reward that falls on an observation reaches the last action before it",
    6: "a turn of zero reward is still a turn",
    7: "all-equal rewards give exactly zero",
}


WHOLE_STEP = "statistics of the whole step: all its groups must be given in one call, as the trainer does"
LENGTHS = "a discounted return depends on how many turns lie ahead, also where all outcomes are equal"
NO_BASELINE = "there is no baseline to take off"
CRITIC = "the baseline is a critic's word, which need not be the mean of the rewards"
KEPT = "what is not kept is not learned from, whichever turn it is"
"""Reasons, shared by several kinds, why an invariant cannot hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """Knobs of a kind, and the invariants that cannot hold with them: number -> reason."""

    kind: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    exempt: Mapping[int, str] = field(default_factory=dict)


def at(exempt: Mapping[int, str] | None = None, /, **knobs: Any) -> Declaration:
    """Return a declaration that, with these knobs, a function cannot keep the invariants `exempt`."""
    return Declaration(knobs=knobs, exempt=exempt or {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of checking one invariant.

    `seen` is a counterexample if the invariant is broken; `why` is the reason if it does not apply.
    """

    seen: str = ""
    why: str = ""


class DoesNotApply(Exception):  # noqa: N818 - not an error: the check does not apply to this function
    """Raised by an adapter if its function cannot express the check; the message gives the reason."""


Part = Callable[[], str | None]
"""() -> a counterexample to one part of an invariant, or None."""


def examine(parts: Mapping[int, Sequence[Part]]) -> dict[int, Finding]:
    """Return the finding for each invariant: broken if one of its parts is, not applicable if none of them applies.

    An exception counts as a counterexample too, because the function accepted other inputs of the same form.
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
        except AssertionError as error:  # raised by a checker for a wrong shape or number in a result
            seen = str(error)
        except Exception as error:
            seen = f"raises {type(error).__name__}: {error}"
        if seen is not None:
            return Finding(seen=seen)
    return Finding(why=reasons[0]) if len(reasons) == len(sides) else Finding()


def broken(findings: Mapping[int, Finding]) -> dict[int, str]:
    """Return the broken invariants: number -> the counterexample."""
    return {number: finding.seen for number, finding in findings.items() if finding.seen}


def format_change(before: float, after: float) -> str:
    """Return a phrase such as "goes from 0.41 to 0.37", with enough digits to tell the numbers apart."""
    digits = next((n for n in range(3, 17) if f"{before:.{n}g}" != f"{after:.{n}g}"), 17)
    return f"goes from {before:.{digits}g} to {after:.{digits}g}"


_Function = TypeVar("_Function", bound=Callable[..., Any])


def declare(*declarations: Declaration) -> Callable[[_Function], _Function]:
    """Declare the knobs with which a function is checked, and the invariants that cannot hold with them.

    @declare(at(), at({3: WHOLE_STEP}, scale="batch_std"))

    A function that declares nothing must keep all invariants with its default knobs.
    """

    def mark(function: _Function) -> _Function:
        cast(Any, function).declarations = declarations
        return function

    return mark


def exempt_of(function: Callable[..., Any], knobs: Mapping[str, Any]) -> Mapping[int, str]:
    """Return the exemptions that a function declares for these knobs; for undeclared knobs, all of them."""
    own = _declared_by(function)
    exact = [each.exempt for each in own if dict(each.knobs) == dict(knobs)]
    return {number: why for exempt in exact or [each.exempt for each in own] for number, why in exempt.items()}


def declarations(room: str) -> tuple[Declaration, ...]:
    """Return the declarations of every kind of a room, in the order of the table.

    A kind that declares nothing is listed with its default knobs.
    """
    return tuple(replace(each, kind=kind) for kind in KINDS[room] for each in _declared_by(resolve(room, kind)))


def _declared_by(function: Callable[..., Any]) -> tuple[Declaration, ...]:
    return getattr(function, "declarations", ()) or (Declaration(),)
