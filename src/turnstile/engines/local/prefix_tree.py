"""Prefix tree of the tokens that the sessions of one group have computed, stored as cache rows without duplicates.

A `PrefixPosition` is a session's place in the tree. It moves freely along known tokens, whichever session computed
them. If a session continues with other tokens, it gets a row of its own, which refers to the previous row for the
shared prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnstile.engines.local.kv_cache import CacheRow, KVCache

COPY_BELOW = 64
"""Shorter histories are copied into a new row, which is cheaper than attending to a shared prefix separately."""


class PrefixPosition:
    """A position in a group's tree: after the first `length` tokens of `row`."""

    __slots__ = ("length", "row")

    def __init__(self, row: CacheRow | None = None, length: int = 0) -> None:
        self.row, self.length = row, length

    def copy(self) -> PrefixPosition:
        """Return a copy that moves independently."""
        return PrefixPosition(self.row, self.length)

    def reset_if_dropped(self) -> None:
        """Return to the root if the row was dropped."""
        if self.row is not None and self.row.size_class is None:
            self.row, self.length = None, 0


class PrefixTree:
    """The cache rows of one group of sessions.

    Without `share_prefixes`, every row holds its whole history, including tokens that other rows hold too.
    """

    def __init__(self, cache: KVCache, *, share_prefixes: bool = True) -> None:
        self._cache = cache
        self._share_prefixes = share_prefixes
        self._rows: list[CacheRow] = []

    def advance(self, position: PrefixPosition, path: Sequence[int], *, resumed: bool = False) -> None:
        """Move a position as far along `path` as the tree knows it.

        With `resumed`, the position has followed this path before and the path has only grown since, so the tokens
        before the position are not compared again.
        """
        self._rows = [row for row in self._rows if row.size_class is not None]
        position.reset_if_dropped()
        if position.row is not None:
            position.length = common_prefix(position.row.tokens, path, position.length if resumed else 0)
        for row in self._rows:
            known = position.length
            if known == len(path):
                return
            if (
                len(row.tokens) > known
                and row.tokens[known] == path[known]
                and (length := common_prefix(row.tokens, path)) > known
            ):
                position.row, position.length = row, length

    def extend(
        self, position: PrefixPosition, tokens: Sequence[int], pinned: set[CacheRow], clock: int, *, force: bool
    ) -> bool:
        """Append `tokens` at a position, move the position to their end, and pin the rows that it uses.

        Returns False if the request has to wait, either for memory (unless `force`) or for the current pass, because it
        computes keys and values that would have to be copied.
        """
        row = position.row
        if row is None or position.length < len(row.tokens):
            row = self._branch(position, pinned, len(tokens), force=force)
        elif not self._cache.reserve(row, len(row.tokens) + len(tokens) - row.begin, pinned, force=force):
            return False
        if row is None:
            return False
        row.tokens.extend(tokens)
        pinned |= row.touch(clock)
        position.row, position.length = row, len(row.tokens)
        return True

    def truncate(self, row: CacheRow, length: int) -> None:
        """Remove a row's tokens after the first `length`, except those that its dependents share."""
        length = max([length, *(other.begin for other in self._rows if other.base is row)])
        del row.tokens[length:]
        row.computed = min(row.computed, length)

    def close(self) -> None:
        """Drop all rows."""
        for row in self._rows:
            if row.size_class is not None:
                self._cache.drop(row)
        self._rows = []

    def _branch(self, position: PrefixPosition, pinned: set[CacheRow], extra: int, *, force: bool) -> CacheRow | None:
        """Return a new row that continues at a position, with room for `extra` tokens; None if that has to wait.

        A row shares a prefix of only one row, which itself has no base, so a branch within a shared prefix refers to
        that prefix's row.
        """
        old, length = position.row, position.length
        while old is not None and old.base is not None and length <= old.begin:
            old = old.base
        uncomputed = old is not None and length > old.computed  # cannot be copied yet
        if old is None:
            row, copied = CacheRow([]), 0
        elif old.base is not None:
            row, copied = CacheRow(old.tokens[: old.begin], old.base), length - old.begin
        elif self._share_prefixes and (length >= COPY_BELOW or uncomputed):
            row, copied, uncomputed = CacheRow(old.tokens[:length], old), 0, False
        else:
            row, copied = CacheRow([]), length
        busy = pinned | ({old} if old is not None else set())
        if uncomputed or not self._cache.reserve(row, copied + extra, busy, force=force):
            if row.base is not None:
                row.base.dependents -= 1
            return None
        if copied:
            assert old is not None
            assert old.size_class is not None
            assert row.size_class is not None
            row.size_class.copy(row.slot, old.size_class, old.slot, copied)
            row.tokens.extend(old.tokens[row.begin : length])
            row.computed = length
        self._rows.append(row)
        return row


def common_prefix(one: Sequence[int], other: Sequence[int], begin: int = 0) -> int:
    """Return how many leading tokens two paths share, given that the first `begin` are equal."""
    shorter = min(len(one), len(other))
    if one[begin:shorter] == other[begin:shorter]:
        return shorter
    return next(i for i in range(begin, shorter) if one[i] != other[i])
