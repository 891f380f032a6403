"""KV cache of the in-process engine, with rows of tokens grouped by capacity, within a memory limit.

A row holds one run of tokens after one history. A row may refer to another row for a shared prefix: its history then
begins with the first `begin` tokens of that row, which are stored once for all its dependents. A size class stores rows
of one capacity side by side, so that one operation attends to many. A size class that grows or shrinks is copied, and
both the old and the new tensors count against the limit while both exist. Therefore no size class of several rows takes
a large part of the memory, which leaves room for the copy.
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
class CacheShape:
    """Shape, dtype and device of the keys, values and hidden states that are cached for a token."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    with_activations: bool = False  # also keep the input of the first trainable layer

    @property
    def states_per_token(self) -> int:
        """Number of hidden states kept for each token: the last one, and the activation if it is kept."""
        return 1 + self.with_activations

    def empty(self) -> Tensor:
        """Return an empty tensor of the cache's dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache."""
        numbers = 2 * self.layers * self.kv_heads * self.head_dim + self.states_per_token * self.hidden
        return numbers * self.dtype.itemsize


def cache_shape_of(model: PreTrainedModel) -> CacheShape:
    """Return the cache shape of a model. Raises ConfigError if its values differ in width from its keys."""
    config: Any = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "v_head_dim", None) not in (None, width):  # DeepSeek V2 and its like
        raise ConfigError(
            f"model family {config.model_type!r} has values of another width than its keys, which this engine does not "
            'support; sample from servers (engine.kind = "openai"), or use another family'
        )
    return CacheShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=width,
        hidden=config.hidden_size,
        dtype=model.dtype,
        device=model.device,
    )


class CacheRow:
    """A path of tokens; those from `begin` on are stored in this row's own slot."""

    __slots__ = ("base", "begin", "computed", "dependents", "last_use", "size_class", "slot", "tokens")

    def __init__(self, tokens: list[int], base: CacheRow | None = None) -> None:
        self.tokens = tokens  # the whole path
        self.base = base
        self.begin = len(tokens) if base else 0
        self.computed = len(tokens)  # the rest are in the pass that is being planned
        self.dependents = 0  # rows that share a prefix of this one
        self.last_use = 0
        self.size_class: SizeClass | None = None  # None once the row is dropped
        self.slot = 0
        if base:
            base.dependents += 1

    def locate(self, position: int) -> tuple[SizeClass, int, int]:
        """Return where a token of the path is stored: (size class, slot, column)."""
        row = self.base if self.base and position < self.begin else self
        assert row.size_class is not None, "a dropped row holds nothing"
        return row.size_class, row.slot, position - row.begin

    def touch(self, clock: int) -> set[CacheRow]:
        """Record `clock` as the time of last use; return the row, and the row that holds its shared prefix if any."""
        used = {self} if self.base is None else {self, self.base}
        for row in used:
            row.last_use = clock
        return used


class SizeClass:
    """R cache rows of one capacity: keys and values [L, 2, R, Hkv, capacity, D], S hidden states [S, R, capacity, H].

    Unwritten entries are zero, so that masked entries are finite.
    """

    def __init__(self, shape: CacheShape, capacity: int, number: int = 0) -> None:
        self._shape = shape
        self.capacity = capacity
        self.number = number  # in order of creation
        self.rows: list[CacheRow | None] = []
        self.kv = self._empty_kv(0)
        self.hidden = self._empty_hidden(0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.capacity * self._shape.bytes_per_token

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return len(self.rows) * self.row_bytes

    @property
    def vacant(self) -> int:
        """Number of vacant slots."""
        return self.rows.count(None)

    @property
    def occupied(self) -> int:
        """Number of occupied slots."""
        return len(self.rows) - self.vacant

    def resize(self, count: int) -> None:
        """Change the number of slots to `count`; existing rows move to the first slots."""
        occupied_rows = [row for row in self.rows if row is not None]
        kv, hidden, self.kv, self.hidden = self.kv, self.hidden, self._empty_kv(count), self._empty_hidden(count)
        for slot, row in enumerate(occupied_rows):
            self._copy_columns(slot, kv, hidden, row.slot, row.computed - row.begin)
            row.slot = slot
        self.rows = [*occupied_rows, *[None] * (count - len(occupied_rows))]

    def copy(self, slot: int, source: SizeClass, source_slot: int, columns: int) -> None:
        """Copy the first `columns` columns of a row, usually of another size class, to `slot`."""
        self._copy_columns(slot, source.kv, source.hidden, source_slot, columns)

    def _copy_columns(self, slot: int, kv: Tensor, hidden: Tensor, source_slot: int, columns: int) -> None:
        self.kv[:, :, slot, :, :columns] = kv[:, :, source_slot, :, :columns]
        self.hidden[:, slot, :columns] = hidden[:, source_slot, :columns]

    def _empty_kv(self, rows: int) -> Tensor:
        s = self._shape
        return zeros((s.layers, 2, rows, s.kv_heads, self.capacity, s.head_dim), s.dtype, s.device)

    def _empty_hidden(self, rows: int) -> Tensor:
        s = self._shape
        return zeros((s.states_per_token, rows, self.capacity, s.hidden), s.dtype, s.device)


MIN_CAPACITY = 128
"""Tokens that the smallest rows hold; the capacities of size classes are powers of two times this."""


AMPLE_SHARE = 0.25
"""Share of the limit up to which memory is ample, so that growing rows take more capacity than they need."""


MAX_CLASS_SHARE = 0.25
"""Largest share of the limit that one size class of several rows takes."""


def _rows_in_class(row: CacheRow) -> int:
    """Return the number of rows in the row's size class, itself included; such rows usually grow alike."""
    return 0 if row.size_class is None else row.size_class.occupied


def _round_up_capacity(tokens: int, factor: int) -> int:
    """Return the smallest capacity for `tokens` tokens that is MIN_CAPACITY times a power of `factor`."""
    capacity = MIN_CAPACITY
    while capacity < tokens:
        capacity *= factor
    return capacity


class KVCache:
    """The cache rows of all groups, in their size classes.

    Evicts the least recently used rows to stay within `limit` bytes, and exceeds the limit only if forced.
    """

    def __init__(self, shape: CacheShape, limit: int) -> None:
        self.shape = shape
        self._evicted = 0
        self._limit = limit
        self._size_classes: list[SizeClass] = []
        self._numbers = itertools.count()

    @property
    def bytes(self) -> int:
        """Bytes of all size classes."""
        return sum(size_class.bytes for size_class in self._size_classes)

    def reserve(self, row: CacheRow, tokens: int, pinned: Collection[CacheRow], *, force: bool) -> bool:
        """Reserve room for `tokens` tokens of `row`, evicting rows that are not `pinned` if necessary.

        Returns False if that does not free enough memory; with `force`, exceeds the limit instead.
        """
        if row.size_class is not None and row.size_class.capacity >= tokens:
            return True
        capacity = self._capacity_for(row, tokens)
        while (size_class := self._find_vacant(capacity) or self._grow(capacity, _rows_in_class(row))) is None:
            if self._compact() or self._evict_one({*pinned, row}):
                continue
            if not force:
                return False
            size_class = self._add_class(capacity, 1)
            break
        slot = size_class.rows.index(None)
        if row.size_class is not None:
            size_class.copy(slot, row.size_class, row.slot, row.computed - row.begin)
            row.size_class.rows[row.slot] = None
        size_class.rows[slot] = row
        row.size_class, row.slot = size_class, slot
        return True

    def _capacity_for(self, row: CacheRow, tokens: int) -> int:
        """Return the capacity for a row that needs room for `tokens` tokens.

        That is the smallest one that fits. But while memory is ample, a growing row takes the next power of four times
        MIN_CAPACITY, so that it moves half as often.
        """
        tight = _round_up_capacity(tokens, 2)
        if row.size_class is None:
            return tight
        roomy = _round_up_capacity(tokens, 4)
        taken = sum(size_class.occupied * size_class.row_bytes for size_class in self._size_classes)
        ample = taken + _rows_in_class(row) * roomy * self.shape.bytes_per_token <= AMPLE_SHARE * self._limit
        return roomy if ample and (self._find_vacant(roomy) or not self._find_vacant(tight)) else tight

    def _find_vacant(self, capacity: int) -> SizeClass | None:
        """Return the first size class of this capacity that has a vacant slot."""
        return next((size_class for size_class in self._of_capacity(capacity) if size_class.vacant), None)

    def _grow(self, capacity: int, neighbours: int) -> SizeClass | None:
        """Return a size class of this capacity with new slots: its last one, enlarged, or an additional one.

        Returns None if the limit leaves no room for one more slot and for the copy.
        """
        row_bytes = capacity * self.shape.bytes_per_token
        free = (self._limit - self.bytes) // row_bytes
        if free < 1:
            return None
        existing = self._of_capacity(capacity)
        has = len(existing[-1].rows) if existing else 0
        extra = max(1, min(neighbours, free // 2), min(has, free))
        longest = max(1, int(MAX_CLASS_SHARE * self._limit) // row_bytes)
        count = min(has + extra, longest, free)  # the old slots stay until the new ones are filled
        if count > has > 0:
            existing[-1].resize(count)
            return existing[-1]
        return self._add_class(capacity, min(extra, longest, free))

    def _add_class(self, capacity: int, count: int) -> SizeClass:
        """Add a size class with `count` slots of this capacity, without regard to the limit."""
        size_class = SizeClass(self.shape, capacity, next(self._numbers))
        size_class.resize(count)
        self._size_classes.append(size_class)
        return size_class

    def _compact(self) -> bool:
        """Release vacant slots where possible; return whether memory was freed."""
        before = self.bytes
        self._size_classes = [size_class for size_class in self._size_classes if size_class.occupied]
        if self.bytes == before:
            self._merge()
        if self.bytes == before:
            for size_class in self._size_classes:
                if size_class.vacant and self.bytes + size_class.occupied * size_class.row_bytes <= self._limit:
                    size_class.resize(size_class.occupied)
                    break
        return self.bytes < before

    def _merge(self) -> None:
        """Move all rows of one size class into vacant slots of others of its capacity, if they fit, and remove it."""
        for size_class in sorted(self._size_classes, key=lambda size_class: size_class.occupied):
            others = [one for one in self._of_capacity(size_class.capacity) if one is not size_class]
            if sum(other.vacant for other in others) < size_class.occupied:
                continue
            for row in [row for row in size_class.rows if row is not None]:
                other = next(other for other in others if other.vacant)
                slot = other.rows.index(None)
                other.copy(slot, size_class, row.slot, row.computed - row.begin)
                other.rows[slot] = row
                row.size_class, row.slot = other, slot
            self._size_classes.remove(size_class)
            return

    def _evict_one(self, pinned: Collection[CacheRow]) -> bool:
        """Evict the least recently used row that is not pinned and has no dependents; return whether there was one."""
        idle = [row for row in self._rows() if row not in pinned and not row.dependents]
        if not idle:
            return False
        self.drop(min(idle, key=lambda row: row.last_use))
        self._evicted += 1
        return True

    def take_evicted(self) -> int:
        """Return the number of rows evicted since the last call."""
        evicted, self._evicted = self._evicted, 0
        return evicted

    def with_shape(self, shape: CacheShape) -> KVCache:
        """Return an empty cache for this shape with the same limit, or the cache itself if it has this shape."""
        return self if shape == self.shape else KVCache(shape, self._limit)

    def hidden_states(self, row: CacheRow | None, length: int, which: int) -> Tensor:
        """Return the hidden states [length, H] of the first `length` tokens of a row's path.

        `which` is 0 for the last hidden states, 1 for the activations. Without a row, returns [0, H].
        """
        if row is None:
            return torch.empty(0, self.shape.hidden, dtype=self.shape.dtype, device=self.shape.device)
        parts = []
        for part, begin, end in ((row.base, 0, min(length, row.begin)), (row, row.begin, length)):
            if part is not None and end > begin:
                size_class, slot, column = part.locate(begin)
                parts.append(size_class.hidden[which, slot, column : column + end - begin])
        return torch.cat(parts)

    def drop(self, row: CacheRow) -> None:
        """Drop a row, which makes its slot vacant."""
        assert row.size_class is not None
        row.size_class.rows[row.slot] = None
        row.size_class = None
        if row.base:
            row.base.dependents -= 1

    def clear(self, *, keep: bool = True) -> None:
        """Drop all rows; with `keep`, the size classes stay for later rows."""
        for row in self._rows():
            row.size_class = None
        for size_class in self._size_classes:
            size_class.rows = [None] * len(size_class.rows)
        if not keep:
            self._size_classes = []

    def _of_capacity(self, capacity: int) -> list[SizeClass]:
        return [size_class for size_class in self._size_classes if size_class.capacity == capacity]

    def _rows(self) -> Iterator[CacheRow]:
        for size_class in self._size_classes:
            yield from (row for row in size_class.rows if row is not None)
