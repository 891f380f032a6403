"""The keys and values of sessions: rows of tokens on shelves, within the memory that is allowed.

A row is one run of tokens after one history. A row may lean on another one: then its history begins with the first
`begin` tokens of that, which lie there once for all that lean. A shelf holds rows of one capacity side by side, so
that many are attended to in one operation. A shelf that grows or shrinks is copied, and both copies count for as long
as they are there; so that there is room for that, a large part of all memory is several shelves.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnstile.errors import ConfigError
from turnstile.models.allocator import zeros


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
        self.shelf: SizeClass | None = None  # None once it is dropped
        self.place = 0
        if base:
            base.leaning += 1

    def at(self, position: int) -> tuple[SizeClass, int, int]:
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


class SizeClass:
    """Rows of one capacity: keys and values [L, 2, R, Hkv, capacity, D], hidden states [S, R, capacity, H].

    What nobody has written is zero, so that what is masked is finite.
    """

    def __init__(self, shape: Shape, capacity: int, number: int = 0) -> None:
        self._shape = shape
        self.capacity = capacity
        self.number = number  # in the order in which they were made
        self.rows: list[Row | None] = []
        self.kv = self._room(0)
        self.hidden = self._states(0)

    @property
    def row_bytes(self) -> int:
        return self.capacity * self._shape.bytes_per_token

    @property
    def bytes(self) -> int:
        return len(self.rows) * self.row_bytes

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

    def copy(self, place: int, source: SizeClass, other: int, columns: int) -> None:
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


PART = 0.25
"""The share of all memory that one shelf of several rows takes at most."""


def _neighbours(row: Row) -> int:
    """The rows on the shelf that a row outgrows, itself among them: they grow like it, as a rule."""
    return 0 if row.shelf is None else row.shelf.occupied


def _capacity(tokens: int, factor: int) -> int:
    """The least that holds so many tokens and is LEAST times a power of `factor`."""
    capacity = LEAST
    while capacity < tokens:
        capacity *= factor
    return capacity


class Memory:
    """The shelves, and who is on them. Drops the least recently used rows when `limit` bytes are taken."""

    def __init__(self, shape: Shape, limit: int) -> None:
        self.shape = shape
        self._dropped = 0
        self._limit = limit
        self._shelves: list[SizeClass] = []
        self._numbers = itertools.count()

    @property
    def bytes(self) -> int:
        return sum(shelf.bytes for shelf in self._shelves)

    def hold(self, row: Row, tokens: int, needed: Collection[Row], *, must: bool) -> bool:
        """Sees to it that `row` has room for `tokens` of its own, if need be by dropping rows that are not `needed`.

        Where even that does not do it exceeds the limit if it `must`, and else returns False.
        """
        if row.shelf is not None and row.shelf.capacity >= tokens:
            return True
        capacity = self._capacity_for(row, tokens)
        while (shelf := self._vacant(capacity) or self._grown(capacity, _neighbours(row))) is None:
            if self._tidied() or self._dropped_one({*needed, row}):
                continue
            if not must:
                return False
            shelf = self._made(capacity, 1)
            break
        place = shelf.rows.index(None)
        if row.shelf is not None:
            shelf.copy(place, row.shelf, row.place, row.computed - row.begin)
            row.shelf.rows[row.place] = None
        shelf.rows[place] = row
        row.shelf, row.place = shelf, place
        return True

    def _capacity_for(self, row: Row, tokens: int) -> int:
        """How long a row becomes that needs room for so many tokens: as short as does; while memory is plentiful a row
        that grows goes on to a power of four times LEAST, so that it moves half as often."""
        least = _capacity(tokens, 2)
        if row.shelf is None:
            return least
        wide = _capacity(tokens, 4)
        taken = sum(shelf.occupied * shelf.row_bytes for shelf in self._shelves)
        plentiful = taken + _neighbours(row) * wide * self.shape.bytes_per_token <= PLENTY * self._limit
        return wide if plentiful and (self._vacant(wide) or not self._vacant(least)) else least

    def _vacant(self, capacity: int) -> SizeClass | None:
        """The first shelf of such rows that has a place left."""
        return next((shelf for shelf in self._shelves if shelf.capacity == capacity and shelf.vacancies), None)

    def _grown(self, capacity: int, neighbours: int) -> SizeClass | None:
        """A shelf of such rows with places that were not there before: the last one made longer, or another one. None
        where the limit leaves no room for one more place, and for what is copied meanwhile."""
        row_bytes = capacity * self.shape.bytes_per_token
        free = (self._limit - self.bytes) // row_bytes
        if free < 1:
            return None
        alike = [shelf for shelf in self._shelves if shelf.capacity == capacity]
        has = len(alike[-1].rows) if alike else 0
        wanted = max(1, min(neighbours, free // 2), min(has, free))
        longest = max(1, int(PART * self._limit) // row_bytes)
        count = min(has + wanted, longest, free)  # the old places are there until these are
        if count > has > 0:
            alike[-1].resize(count)
            return alike[-1]
        return self._made(capacity, min(wanted, longest, free))

    def _made(self, capacity: int, count: int) -> SizeClass:
        shelf = SizeClass(self.shape, capacity, next(self._numbers))
        shelf.resize(count)
        self._shelves.append(shelf)
        return shelf

    def _tidied(self) -> bool:
        """Gives back places that nobody is on, where that can be done; says whether any was."""
        before = self.bytes
        self._shelves = [shelf for shelf in self._shelves if shelf.occupied]
        if self.bytes == before:
            self._merge()
        if self.bytes == before:
            for shelf in self._shelves:
                if shelf.vacancies and self.bytes + shelf.occupied * shelf.row_bytes <= self._limit:
                    shelf.resize(shelf.occupied)
                    break
        return self.bytes < before

    def _merge(self) -> None:
        """Empties a shelf whose rows find places on others."""
        for shelf in sorted(self._shelves, key=lambda shelf: shelf.occupied):
            others = [other for other in self._shelves if other.capacity == shelf.capacity and other is not shelf]
            if sum(other.vacancies for other in others) < shelf.occupied:
                continue
            for row in [row for row in shelf.rows if row is not None]:
                other = next(other for other in others if other.vacancies)
                place = other.rows.index(None)
                other.copy(place, shelf, row.place, row.computed - row.begin)
                other.rows[place] = row
                row.shelf, row.place = other, place
            self._shelves.remove(shelf)
            return

    def _dropped_one(self, needed: Collection[Row]) -> bool:
        """Drops the row that was not used for longest, of those that nobody needs; says whether there was one."""
        idle = [row for row in self._rows() if row not in needed and not row.leaning]
        if not idle:
            return False
        self.drop(min(idle, key=lambda row: row.last_use))
        self._dropped += 1
        return True

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
        for shelf in self._shelves:
            shelf.rows = [None] * len(shelf.rows)
        if not keep:
            self._shelves = []

    def _rows(self) -> Iterator[Row]:
        for shelf in self._shelves:
            yield from (row for row in shelf.rows if row is not None)
