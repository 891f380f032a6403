"""Choose which cache rows of a pass are attended to in one operation.

Rows in neighbouring slots of a size class are padded to one shape where padding costs less than another operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnstile.engines.local.kv_cache import CacheRow, SizeClass

MAX_PADDING = 2048
"""Padded (query, column) pairs that cost as much as one more attention operation."""

DECODE_QUERIES = 2
"""Most queries of a row that only decodes: its last token and one draft."""

Query = tuple[int, int]
"""Offset of a query in the flat run of new tokens, and the number of columns of a row that it sees."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Slots begin..end-1 of a size class that are attended to in one operation.

    All rows are padded to the largest number of queries and to the largest number of columns among them.
    """

    begin: int
    end: int
    occupied: int  # slots that have queries
    queries: int
    columns: int
    pairs: int  # (query, column) pairs that are needed

    @property
    def slots(self) -> range:
        """The slots of the tile."""
        return range(self.begin, self.end)

    @property
    def padding(self) -> int:
        """Number of (query, column) pairs that are computed but not needed."""
        return len(self.slots) * self.queries * self.columns - self.pairs

    def merged(self, other: Tile) -> Tile:
        """Return one tile that spans the slots of this tile and of `other`, which comes after it."""
        return Tile(
            self.begin,
            other.end,
            self.occupied + other.occupied,
            max(self.queries, other.queries),
            max(self.columns, other.columns),
            self.pairs + other.pairs,
        )


def attention_tiles(queries: Mapping[CacheRow, Sequence[Query]]) -> list[tuple[SizeClass, Tile, list[Sequence[Query]]]]:
    """Return the tiles of a pass, each as (size class, tile, queries of each of its slots).

    Rows with few queries get tiles of their own where that costs less than padding them to the other rows.
    """
    size_classes: dict[SizeClass, dict[int, Sequence[Query]]] = {}
    for row, row_queries in queries.items():
        assert row.size_class is not None
        size_classes.setdefault(row.size_class, {})[row.slot] = row_queries
    chosen = []
    for size_class, rows in size_classes.items():
        short = {slot: row_queries for slot, row_queries in rows.items() if len(row_queries) <= DECODE_QUERIES}
        long = {slot: row_queries for slot, row_queries in rows.items() if len(row_queries) > DECODE_QUERIES}
        together, apart = [(rows, _merge_tiles(rows))], [(part, _merge_tiles(part)) for part in (short, long)]
        for part, tiles in min(together, apart, key=_tile_cost):
            chosen += [(size_class, one, [part.get(slot, ()) for slot in one.slots]) for one in tiles]
    return chosen


def max_columns(queries: Sequence[Query]) -> int:
    """Return the largest number of columns that any of the queries sees."""
    return max(seen for _, seen in queries)


def _tile_cost(parts: Sequence[tuple[object, Sequence[Tile]]]) -> int:
    """Return the cost of the tiles in padded pairs."""
    return sum(one.padding + MAX_PADDING for _, tiles in parts for one in tiles)


def _merge_tiles(rows: Mapping[int, Sequence[Query]]) -> list[Tile]:
    """Return tiles for the slots of `rows`, merged with their neighbours where that costs less."""
    merged: list[Tile] = []
    for slot in sorted(rows):
        seen = [columns for _, columns in rows[slot]]
        one = Tile(slot, slot + 1, 1, len(seen), max(seen), sum(seen))
        if merged and (union := merged[-1].merged(one)).padding <= MAX_PADDING * (union.occupied - 1):
            merged[-1] = union
        else:
            merged.append(one)
    return merged
