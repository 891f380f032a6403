"""The keys and values of sessions: rows of tokens on shelves, within the memory that is allowed.

A row is one run of tokens after one history. A row may lean on another one: then its history begins with the first
`begin` tokens of that, which lie there once for all that lean. A shelf holds rows of one capacity side by side, so
that many are attended to in one operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnstile.errors import ConfigError
from turnstile.models.memory import zeros


@dataclass(frozen=True, slots=True)
class Shape:
    """What one token's keys and values take."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    trunk: bool = False  # also keep what goes into the first layer that learns

    @property
    def states(self) -> int:
        """Hidden states kept of each token: the last, and the trunk's."""
        return 1 + self.trunk

    def empty(self) -> Tensor:
        """No numbers, of the kind that is kept."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def bytes_per_token(self) -> int:
        numbers = 2 * self.layers * self.kv_heads * self.head_dim + self.states * self.hidden
        return numbers * self.dtype.itemsize


def shape_of(model: PreTrainedModel) -> Shape:
    """What the engine keeps of each token of a model. Raises ConfigError where values have another width than keys."""
    config: Any = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "v_head_dim", None) not in (None, width):  # DeepSeek V2 and its like
        raise ConfigError(
            f"model family {config.model_type!r} has values of another width than its keys, which this engine does not "
            'hold; sample it from servers (engine.kind = "openai"), or take another family'
        )
    return Shape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=width,
        hidden=config.hidden_size,
        dtype=model.dtype,
        device=model.device,
    )


class Row:
    """A path of tokens, of which those from `begin` on lie in a place of this row's own."""

    __slots__ = ("base", "begin", "computed", "last_use", "leaning", "place", "shelf", "tokens")

    def __init__(self, tokens: list[int], base: Row | None = None) -> None:
        self.tokens = tokens  # the whole path
        self.base = base
        self.begin = len(tokens) if base else 0
        self.computed = len(tokens)  # those behind are in the pass that is being planned
        self.leaning = 0  # rows that begin in this one
        self.last_use = 0
        self.shelf: Shelf | None = None  # None once it is dropped
        self.place = 0
        if base:
            base.leaning += 1

    def at(self, position: int) -> tuple[Shelf, int, int]:
        """Where a token of the path lies: shelf, place on it, column."""
        row = self.base if self.base and position < self.begin else self
        assert row.shelf is not None, "a dropped row holds nothing"
        return row.shelf, row.place, position - row.begin

    def use(self, clock: int) -> set[Row]:
        """Notes when it was used; returns it, with the row that it leans on."""
        used = {self} if self.base is None else {self, self.base}
        for row in used:
            row.last_use = clock
        return used


class Shelf:
    """Rows of one capacity: keys and values [L, 2, R, Hkv, capacity, D], hidden states [S, R, capacity, H].

    What nobody has written is zero, so that what is masked is finite.
    """

    def __init__(self, shape: Shape, capacity: int) -> None:
        self._shape = shape
        self.capacity = capacity
        self.rows: list[Row | None] = []
        self.kv = self._room(0)
        self.hidden = self._states(0)

    @property
    def row_bytes(self) -> int:
        return self.capacity * self._shape.bytes_per_token

    @property
    def vacancies(self) -> int:
        return self.rows.count(None)

    @property
    def occupied(self) -> int:
        return len(self.rows) - self.vacancies

    def resize(self, count: int) -> None:
        """Makes room for `count` rows; those it has move together."""
        kept = [row for row in self.rows if row is not None]
        kv, hidden, self.kv, self.hidden = self.kv, self.hidden, self._room(count), self._states(count)
        for place, row in enumerate(kept):
            self._take(place, kv, hidden, row.place, row.computed - row.begin)
            row.place = place
        self.rows = [*kept, *[None] * (count - len(kept))]

    def copy(self, place: int, source: Shelf, other: int, columns: int) -> None:
        """Takes over the first columns of a row of another shelf."""
        self._take(place, source.kv, source.hidden, other, columns)

    def _take(self, place: int, kv: Tensor, hidden: Tensor, other: int, columns: int) -> None:
        self.kv[:, :, place, :, :columns] = kv[:, :, other, :, :columns]
        self.hidden[:, place, :columns] = hidden[:, other, :columns]

    def _room(self, rows: int) -> Tensor:
        s = self._shape
        return zeros((s.layers, 2, rows, s.kv_heads, self.capacity, s.head_dim), s.dtype, s.device)

    def _states(self, rows: int) -> Tensor:
        s = self._shape
        return zeros((s.states, rows, self.capacity, s.hidden), s.dtype, s.device)


LEAST = 128
"""Tokens that the smallest rows hold; each further shelf holds rows of twice as many."""


PLENTY = 0.25
"""The share of all memory within which rows that grow take more room than they need."""


def _neighbours(row: Row) -> int:
    """The rows on the shelf that a row outgrows, itself among them: they grow like it, as a rule."""
    return 0 if row.shelf is None else row.shelf.occupied


class Memory:
    """The shelves, and who is on them. Drops the least recently used rows when `limit` bytes are taken."""

    def __init__(self, shape: Shape, limit: int) -> None:
        self.shape = shape
        self._dropped = 0
        self._limit = limit
        self._shelves: dict[int, Shelf] = {}

    @property
    def bytes(self) -> int:
        return sum(len(shelf.rows) * shelf.row_bytes for shelf in self._shelves.values())

    def hold(self, row: Row, tokens: int, needed: Collection[Row], *, must: bool) -> bool:
        """Sees to it that `row` has room for `tokens` of its own, if need be by dropping rows that are not `needed`.

        Where even that does not do it exceeds the limit if it `must`, and else returns False.
        """
        if row.shelf is not None and row.shelf.capacity >= tokens:
            return True
        shelf = self._shelf_for(row, tokens)
        if not self._vacate(shelf, {*needed, row}) and not must:
            return False
        if not shelf.vacancies:
            spare = (self._limit - self.bytes) // shelf.row_bytes
            following = min(_neighbours(row), spare // 2)
            shelf.resize(len(shelf.rows) + max(1, following, min(len(shelf.rows), spare)))
        place = shelf.rows.index(None)
        if row.shelf is not None:
            shelf.copy(place, row.shelf, row.place, row.computed - row.begin)
            row.shelf.rows[row.place] = None
        shelf.rows[place] = row
        row.shelf, row.place = shelf, place
        return True

    def _shelf_for(self, row: Row, tokens: int) -> Shelf:
        """Where a row goes that needs room for so many tokens: to the shortest rows that do; while memory is plentiful
        a row that grows goes on to a power of four times LEAST, so that it moves half as often."""
        least = self._shelf(tokens, 2)
        if row.shelf is None:
            return least
        wide = self._shelf(tokens, 4)
        taken = sum(shelf.occupied * shelf.row_bytes for shelf in self._shelves.values())
        plentiful = taken + _neighbours(row) * wide.row_bytes <= PLENTY * self._limit
        return wide if plentiful and (wide.vacancies or not least.vacancies) else least

    def _shelf(self, tokens: int, factor: int) -> Shelf:
        """That of the shortest rows which hold so many tokens and whose capacity is LEAST times a power of `factor`."""
        capacity = LEAST
        while capacity < tokens:
            capacity *= factor
        return self._shelves.setdefault(capacity, Shelf(self.shape, capacity))

    def take_dropped(self) -> int:
        """Rows dropped for want of room since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def for_shape(self, shape: Shape) -> Memory:
        """As much memory, empty, for tokens of another shape."""
        return self if shape == self.shape else Memory(shape, self._limit)

    def states(self, row: Row | None, length: int, which: int) -> Tensor:
        """Hidden states [n, H] of the first `length` tokens of a path."""
        if row is None:
            return torch.empty(0, self.shape.hidden, dtype=self.shape.dtype, device=self.shape.device)
        parts = []
        for part, begin, end in ((row.base, 0, min(length, row.begin)), (row, row.begin, length)):
            if part is not None and end > begin:
                shelf, place, column = part.at(begin)
                parts.append(shelf.hidden[which, place, column : column + end - begin])
        return torch.cat(parts)

    def drop(self, row: Row) -> None:
        """Forgets what a row holds."""
        assert row.shelf is not None
        row.shelf.rows[row.place] = None
        row.shelf = None
        if row.base:
            row.base.leaning -= 1

    def clear(self, *, keep: bool = True) -> None:
        """Forgets everything; if they are to be kept the shelves stay, for what comes next."""
        for row in self._rows():
            row.shelf = None
        for shelf in self._shelves.values():
            shelf.rows = [None] * len(shelf.rows)
        if not keep:
            self._shelves = {}

    def _vacate(self, shelf: Shelf, needed: Collection[Row]) -> bool:
        """Makes room for one more row on a shelf; False when there is none and nothing more to drop."""
        while not shelf.vacancies and self.bytes + shelf.row_bytes > self._limit:
            others = [other for other in self._shelves.values() if other.vacancies]
            if others:
                others[0].resize(others[0].occupied)
                continue
            idle = [row for row in self._rows() if row not in needed and not row.leaning]
            if not idle:
                return False
            self.drop(min(idle, key=lambda row: row.last_use))
            self._dropped += 1
        return True

    def _rows(self) -> Iterator[Row]:
        for shelf in self._shelves.values():
            yield from (row for row in shelf.rows if row is not None)
