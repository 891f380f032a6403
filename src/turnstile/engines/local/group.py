"""What the sessions of one group have computed: a tree of tokens, kept as rows, in which nothing stands twice.

A cursor is a session's place in it. It moves freely along tokens that are known, whoever had them computed; where it
goes on alone it gets a row of its own, which leans on the row that it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnstile.engines.local.kv_cache import Memory, Row

SHORT = 64
"""A history of fewer tokens is copied when sessions part: that is cheaper than attending to it apart."""


class Cursor:
    """A place in a group's tree: after the first `length` tokens of `row`."""

    __slots__ = ("length", "row")

    def __init__(self, row: Row | None = None, length: int = 0) -> None:
        self.row, self.length = row, length

    def copy(self) -> Cursor:
        return Cursor(self.row, self.length)

    def settle(self) -> None:
        """Leaves a row that was dropped."""
        if self.row is not None and self.row.shelf is None:
            self.row, self.length = None, 0


class Group:
    """The rows of one group of sessions. With `lean` off rows hold their whole history, and repeat what they share."""

    def __init__(self, memory: Memory, *, lean: bool = True) -> None:
        self._memory = memory
        self._lean = lean
        self._rows: list[Row] = []

    def follow(self, cursor: Cursor, path: Sequence[int], *, again: bool = False) -> None:
        """Moves a cursor to where it has as much of `path` behind it as is known here. `again` says that it went along
        this path before, which has only grown since: then what lies behind it is not looked at."""
        self._rows = [row for row in self._rows if row.shelf is not None]
        cursor.settle()
        if cursor.row is not None:
            cursor.length = common(cursor.row.tokens, path, cursor.length if again else 0)
        for row in self._rows:
            here = cursor.length
            if here == len(path):
                return
            if (
                len(row.tokens) > here
                and row.tokens[here] == path[here]
                and (length := common(row.tokens, path)) > here
            ):
                cursor.row, cursor.length = row, length

    def extend(self, cursor: Cursor, tokens: Sequence[int], needed: set[Row], clock: int, *, must: bool) -> bool:
        """Takes room for `tokens` behind a cursor and moves it there; the rows it uses are `needed` from then on.

        False if that has to wait: for memory, unless it `must` have it, or for the pass
        under way, which computes what would have to be copied.
        """
        row = cursor.row
        if row is None or cursor.length < len(row.tokens):
            row = self._part(cursor, needed, len(tokens), must=must)
        elif not self._memory.hold(row, len(row.tokens) + len(tokens) - row.begin, needed, must=must):
            return False
        if row is None:
            return False
        row.tokens.extend(tokens)
        needed |= row.use(clock)
        cursor.row, cursor.length = row, len(row.tokens)
        return True

    def retract(self, row: Row, length: int) -> None:
        """Takes back the tokens of a row behind the first `length`, but for those that other rows lean on."""
        length = max([length, *(other.begin for other in self._rows if other.base is row)])
        del row.tokens[length:]
        row.computed = min(row.computed, length)

    def close(self) -> None:
        """Drops all rows."""
        for row in self._rows:
            if row.shelf is not None:
                self._memory.drop(row)
        self._rows = []

    def _part(self, cursor: Cursor, needed: set[Row], more: int, *, must: bool) -> Row | None:
        """A new row that goes on from a cursor, with room for `more` tokens; None if that has to wait."""
        old, length = cursor.row, cursor.length
        while old is not None and old.base is not None and length <= old.begin:
            old = old.base
        fresh = old is not None and length > old.computed  # not there to be copied yet
        if old is None:
            row, copied = Row([]), 0
        elif old.base is not None:
            row, copied = Row(old.tokens[: old.begin], old.base), length - old.begin
        elif self._lean and (length >= SHORT or fresh):
            row, copied, fresh = Row(old.tokens[:length], old), 0, False
        else:
            row, copied = Row([]), length
        busy = needed | ({old} if old is not None else set())
        if fresh or not self._memory.hold(row, copied + more, busy, must=must):
            if row.base is not None:
                row.base.leaning -= 1
            return None
        if copied:
            assert old is not None
            assert old.shelf is not None
            assert row.shelf is not None
            row.shelf.copy(row.place, old.shelf, old.place, copied)
            row.tokens.extend(old.tokens[row.begin : length])
            row.computed = length
        self._rows.append(row)
        return row


def common(one: Sequence[int], other: Sequence[int], begin: int = 0) -> int:
    """How many tokens two paths begin with alike, of which the first `begin` are known to be."""
    shorter = min(len(one), len(other))
    if one[begin:shorter] == other[begin:shorter]:
        return shorter
    return next(i for i in range(begin, shorter) if one[i] != other[i])
