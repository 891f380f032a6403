"""Which rows of a pass are attended to together: those that lie side by side on a shelf, padded to one shape where that
costs less than an operation of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnstile.engines.local.kv_cache import Row, SizeClass

WASTE = 2048
"""Pairs of a query and a column that are computed for nothing rather than others in an operation of their own."""

LONE = 2
"""Queries of a row that only decodes: its last token, or a guess at the next besides."""

Query = tuple[int, int]
"""A place in the flat run of new tokens, and how many columns of a row are seen from there."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Places begin..end-1 of a shelf, taken together: all get as many queries as the one with most of them, and all
    those see as many columns as the one that sees most."""

    begin: int
    end: int
    members: int  # places of which anything is asked
    queries: int
    columns: int
    pairs: int  # that see each other

    @property
    def places(self) -> range:
        return range(self.begin, self.end)

    @property
    def wasted(self) -> int:
        return len(self.places) * self.queries * self.columns - self.pairs

    def joined(self, other: Stretch) -> Stretch:
        return Stretch(
            self.begin,
            other.end,
            self.members + other.members,
            max(self.queries, other.queries),
            max(self.columns, other.columns),
            self.pairs + other.pairs,
        )


def stretches(queries: Mapping[Row, Sequence[Query]]) -> list[tuple[SizeClass, Stretch, list[Sequence[Query]]]]:
    """Rows that lie side by side, or nearly, with the queries of each place; rows of few queries go apart from those of
    more where that costs less than padding them."""
    shelves: dict[SizeClass, dict[int, Sequence[Query]]] = {}
    for row, own in queries.items():
        assert row.shelf is not None
        shelves.setdefault(row.shelf, {})[row.place] = own
    found = []
    for shelf, rows in shelves.items():
        few = {place: own for place, own in rows.items() if len(own) <= LONE}
        more = {place: own for place, own in rows.items() if len(own) > LONE}
        together, apart = [(rows, _joined(rows))], [(part, _joined(part)) for part in (few, more)]
        for part, ones in min(together, apart, key=_cost):
            found += [(shelf, one, [part.get(place, ()) for place in one.places]) for one in ones]
    return found


def columns_seen(queries: Sequence[Query]) -> int:
    """How many columns the query sees that sees most."""
    return max(seen for _, seen in queries)


def _cost(parts: Sequence[tuple[object, Sequence[Stretch]]]) -> int:
    """In pairs that are computed for nothing."""
    return sum(one.wasted + WASTE for _, ones in parts for one in ones)


def _joined(rows: Mapping[int, Sequence[Query]]) -> list[Stretch]:
    """The places of `rows`, put together as far as it pays."""
    found: list[Stretch] = []
    for place in sorted(rows):
        seen = [columns for _, columns in rows[place]]
        one = Stretch(place, place + 1, 1, len(seen), max(seen), sum(seen))
        if found and (both := found[-1].joined(one)).wasted <= WASTE * (both.members - 1):
            found[-1] = both
        else:
            found.append(one)
    return found
