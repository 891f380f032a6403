"""The reward of each term in each turn: the part granted, the part withheld, and the gates that withheld it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turnstile.types import F32, Score


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """One step term in one turn. `by` names what withheld it: terms with closed gates, and `on_stop.STOP`."""

    term: str
    granted: float
    withheld: float
    by: tuple[str, ...] = ()


def resolve_turn(score: Score, turn: int) -> tuple[Resolved, ...]:
    """Return every step term of a turn, numbered from 0, in the order of the recipe.

    The granted amounts add up to the turn's composed reward.
    """

    def of(by_term: Mapping[str, F32], term: str) -> float:
        return float(by_term[term][turn]) if term in by_term else 0.0

    found = []
    for term in dict.fromkeys((*score.granted, *score.withheld)):
        withheld = of(score.withheld, term)
        by = tuple(score.withheld_by.get(term, ())) if withheld else ()
        found.append(Resolved(term=term, granted=of(score.granted, term), withheld=withheld, by=by))
    return tuple(found)


def resolve_turns(score: Score) -> list[tuple[Resolved, ...]]:
    """Return every step term of each turn. The turns have no terms if infrastructure failed."""
    return [resolve_turn(score, turn) for turn in range(len(score.turn))]
