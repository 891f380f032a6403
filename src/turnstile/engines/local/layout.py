"""Attention of one pass over new tokens of many cache rows (see `models.attention.Layout`).

Most rows get one token per pass, or a few with drafts. A compiled kernel attends to those token by token
(`engines/local/cpu/compiled.py`). Without a kernel they are attended to in tiles: rows that share a prefix see it in a
single product, and the two parts (own tokens, shared prefix) are merged by the log-sum-exps of their scores. Longer
runs of prompt and observation tokens are attended to one run at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from turnstile.engines.local.attention_tiles import MAX_PADDING, Query, Tile, attention_tiles, max_columns
from turnstile.engines.local.cpu.compiled import CacheSegment, KernelAttention, can_compute
from turnstile.engines.local.kv_cache import CacheRow, SizeClass
from turnstile.models.forest_attention import attend_with_sums

SHORT_SPAN = 64
"""Most tokens of a span that is attended to together with spans of other rows."""


@dataclass(slots=True, eq=False)
class Span:
    """New tokens of one row in one pass: positions begin..end-1 of its path, at `offset` in the flat run of tokens."""

    row: CacheRow
    begin: int
    end: int
    offset: int = 0

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.end - self.begin

    @property
    def is_short(self) -> bool:
        """Whether the span is attended to together with the spans of other rows."""
        return self.size <= SHORT_SPAN

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens."""
        return self.row.tokens[self.begin : self.end]

    @property
    def token_slice(self) -> slice:
        """The tokens' slice of the flat run."""
        return slice(self.offset, self.offset + self.size)


def lay_out(spans: Sequence[Span]) -> list[Span]:
    """Return the spans in the order of computation, short ones first and by size class, with their offsets set."""

    def order(span: Span) -> tuple[bool, int, int, int]:
        assert span.row.size_class is not None
        return not span.is_short, span.row.size_class.capacity, span.row.size_class.number, span.row.slot

    ordered, offset = sorted(spans, key=order), 0
    for span in ordered:
        span.offset = offset
        offset += span.size
    return ordered


def _selector_of(slots: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return an index that selects `slots`: a slice, which copies nothing, if they are consecutive, else a tensor."""
    first = slots[0] if slots else 0
    if list(slots) == list(range(first, first + len(slots))):
        return slice(first, first + len(slots))
    return torch.tensor(slots, device=device)


def _concat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _stack_kv(key: Tensor, value: Tensor) -> Tensor:
    """Return key and value [1, Hkv, T, D] stacked as [T, 2, Hkv, D]."""
    return torch.stack((key[0], value[0])).permute(2, 0, 1, 3)


class _CacheWriter:
    """Writes the new keys, values and hidden states of one size class."""

    def __init__(self, size_class: SizeClass, spans: Sequence[Span]) -> None:
        device = size_class.kv.device
        short = [(span, i) for span in spans if span.is_short for i in range(span.size)]
        self._size_class = size_class
        self._stored = size_class.kv.unbind()
        self._has_short = bool(short)
        self._source = _selector_of([span.offset + i for span, i in short], device)
        self._rows = torch.tensor([span.row.slot for span, _ in short], device=device)
        self._columns = torch.tensor([span.begin + i - span.row.begin for span, i in short], device=device)
        self._long = [
            (span.token_slice, span.row.slot, slice(span.begin - span.row.begin, span.end - span.row.begin))
            for span in spans
            if not span.is_short
        ]

    def write(self, layer: int, new: Tensor) -> None:
        """Write one layer's keys and values [T, 2, Hkv, D], stacked by `_stack_kv`."""
        stored = self._stored[layer]
        if self._has_short:
            stored[:, self._rows, :, self._columns] = new[self._source]
        for token_slice, row, columns in self._long:
            stored[:, row, :, columns] = new[token_slice].permute(1, 2, 0, 3)

    def store_hidden(self, states: Sequence[Tensor]) -> None:
        """Write the hidden states [T, H] of the new tokens: the last ones, then the activations if they are kept."""
        for stored, state in zip(self._size_class.hidden, states, strict=True):
            if self._has_short:
                stored[self._rows, self._columns] = state[self._source]
            for token_slice, row, columns in self._long:
                stored[row, columns] = state[token_slice]


class _TileAttention:
    """Attention of one tile of R rows, with m queries for each row, some of which are padding."""

    def __init__(self, size_class: SizeClass, tile: Tile, queries: Sequence[Sequence[Query]]) -> None:
        padded = [[*row, *[(0, 0)] * (tile.queries - len(row))] for row in queries]
        self.tile, self.device = tile, size_class.kv.device
        self.queries = [query for row in padded for query in row]
        stored = size_class.kv[:, :, tile.begin : tile.end, :, : tile.columns]
        self._keys, self._values = (part.unbind() for part in stored.unbind(1))  # [R, Hkv, columns, D] of each layer
        self._bias: Tensor | None = None  # [R, 1, m, 1, columns]; None if every query sees all columns
        if any(seen < tile.columns for _, seen in self.queries):
            limits = torch.tensor([[max(seen, 1) for _, seen in row] for row in padded], device=self.device)
            hidden = (torch.arange(tile.columns, device=self.device) >= limits[..., None])[:, None, :, None]
            self._bias = torch.zeros(hidden.shape, dtype=stored.dtype, device=self.device)
            self._bias.masked_fill_(hidden, float("-inf"))
        self._head_bias: Tensor | None = None

    def attend(self, layer: int, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return outputs [R * m * G, Hkv, D] and log-sum-exps [R * m * G, Hkv] for query [Hkv, R * m * G, D].

        The G query heads that share a key head count as further queries.
        """
        key, value = self._keys[layer], self._values[layer]
        query = query.unflatten(1, (len(key), -1)).transpose(0, 1)
        if self._bias is not None and self._head_bias is None:  # made once, for all layers
            heads = query.shape[2] // self.tile.queries
            self._head_bias = self._bias.expand(-1, -1, -1, heads, -1).flatten(2, 3)
        seen, mass = attend_with_sums(query, key, value, self._head_bias, scale)
        return seen.transpose(1, 2).flatten(0, 1), mass.transpose(1, 2).flatten(0, 1)


class _ShortSpanAttention:
    """Attention of short spans, in which each token sees its own row and that row's shared prefix."""

    def __init__(self, queries: Sequence[tuple[CacheRow, int, int]]) -> None:
        """Group the queries of all tokens into tiles.

        Each query is (row, offset in the flat run, end of the visible path), in the order of the run.
        """
        own_queries: dict[CacheRow, list[Query]] = {}
        shared_queries: dict[CacheRow, list[Query]] = {}  # of the rows that hold a shared prefix
        for row, offset, end in queries:
            own_queries.setdefault(row, []).append((offset, end - row.begin))
            if row.base is not None:
                shared_queries.setdefault(row.base, []).append((offset, row.begin))
        for row in own_queries.keys() & shared_queries.keys():
            # A row that keeps sampling after a shared prefix joins the tile of its dependents while that is cheap.
            further_columns = max_columns(own_queries[row]) - max_columns(shared_queries[row])
            if len(shared_queries[row]) * further_columns <= MAX_PADDING:
                shared_queries[row] += own_queries.pop(row)
        self.own_tiles = [_TileAttention(*tile) for tile in attention_tiles(own_queries)]
        self.shared_tiles = [_TileAttention(*tile) for tile in attention_tiles(shared_queries)]
        flat = [query for tile in (*self.own_tiles, *self.shared_tiles) for query in tile.queries]
        parts: dict[int, list[int]] = {}
        for i, (offset, seen) in enumerate(flat):
            if seen:
                parts.setdefault(offset, []).append(i)
        device = (*self.own_tiles, *self.shared_tiles)[0].device
        self._query_index = _selector_of([offset for offset, _ in flat], device)
        self._first_part = _selector_of([parts[offset][0] for _, offset, _ in queries], device)
        # A token that sees one part has the same first and last part.
        self._last_part = _selector_of([parts[offset][-1] for _, offset, _ in queries], device)
        self._needs_merge = any(len(part) > 1 for part in parts.values())

    def attend(self, layer: int, query: Tensor, kv_heads: int, scale: float) -> Tensor:
        """Return the output [n, Hq, D] for the first n tokens of query [T, Hq, D]."""
        grouped = query[self._query_index].unflatten(1, (kv_heads, -1))
        heads = grouped.shape[2]
        tiles = (*self.own_tiles, *self.shared_tiles)
        pieces = grouped.transpose(0, 1).flatten(1, 2).split([len(tile.queries) * heads for tile in tiles], dim=1)
        outputs = [tile.attend(layer, piece, scale) for tile, piece in zip(tiles, pieces, strict=True)]
        seen, mass = (_concat(parts).unflatten(0, (-1, heads)) for parts in zip(*outputs, strict=True))
        out: Tensor = seen[self._first_part]
        if self._needs_merge:
            share = (mass[self._last_part] - mass[self._first_part]).sigmoid_()[..., None]
            out = torch.lerp(out.to(share.dtype), seen[self._last_part].to(share.dtype), share).to(out.dtype)
        return out.transpose(1, 2).flatten(1, 2)


class _LongSpanAttention:
    """Attention of one long span, in which each token sees its row's path up to and including itself."""

    def __init__(self, span: Span) -> None:
        row = span.row
        segments = [(row, span.end - row.begin)]
        if row.base is not None:
            segments.insert(0, (row.base, row.begin))
        self._segments = [(*part.locate(part.begin)[:2], columns) for part, columns in segments]
        self._span = span
        visible = torch.ones(span.size, span.end, dtype=torch.bool, device=self._segments[0][0].kv.device)
        self._mask = visible.tril(span.begin) if span.begin else None

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Return the output [n, Hq, D] for the span's tokens of query [T, Hq, D]."""
        segments = [size_class.kv[layer, :, slot, :, :columns] for size_class, slot, columns in self._segments]
        key, value = segments[0] if len(segments) == 1 else torch.cat(segments, dim=2)
        own_query = query[self._span.token_slice].transpose(0, 1)
        seen = scaled_dot_product_attention(
            own_query[None], key[None], value[None], attn_mask=self._mask, is_causal=self._mask is None, scale=scale,
            enable_gqa=True,
        )  # fmt: skip
        return seen[0].transpose(0, 1)


def _kernel_attention(spans: Sequence[Span]) -> KernelAttention | None:
    """Return the compiled attention of spans that start the run, or None if there are none or no kernel fits."""
    if not spans or not can_compute(spans[0].row.locate(spans[0].begin)[0].kv):
        return None
    seen: list[list[CacheSegment]] = []
    for span in spans:
        assert span.offset == len(seen), "spans are laid out one after the other"
        size_class, slot, column = span.row.locate(span.begin)
        before: list[CacheSegment] = []
        if span.row.base is not None and span.row.begin > 0:
            base_class, base_slot, _ = span.row.locate(0)
            before = [(base_class.kv, base_slot, span.row.begin)]
        seen += [[*before, (size_class.kv, slot, column + i + 1)] for i in range(span.size)]
    return KernelAttention(seen)


def _cache_writers(spans: Sequence[Span]) -> list[_CacheWriter]:
    classes = {span.row.size_class for span in spans if span.row.size_class is not None}
    return [_CacheWriter(one, [span for span in spans if span.row.size_class is one]) for one in classes]


class CacheLayout:
    """Attention layout of one pass over `spans`, which `lay_out` returned."""

    def __init__(self, spans: Sequence[Span]) -> None:
        short, long = ([span for span in spans if span.is_short is is_short] for is_short in (True, False))
        self._hidden_writers = _cache_writers(spans)
        self.kernel = _kernel_attention(short)
        self._kv_writers = self._hidden_writers if self.kernel is None else _cache_writers(long)
        self.short_spans = None
        if short and self.kernel is None:
            tokens = [(span.row, span.offset + i, span.begin + i + 1) for span in short for i in range(span.size)]
            self.short_spans = _ShortSpanAttention(tokens)
        self._long_spans = [_LongSpanAttention(span) for span in long]

    def store_hidden(self, states: Sequence[Tensor]) -> None:
        """Store the hidden states [T, H] of the pass."""
        for writer in self._hidden_writers:
            writer.store_hidden(states)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Write the new keys and values, then return the output as `models.attention.Layout` does."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        self._write(layer, key, value)  # before any attention: a row may share tokens that this very pass computes
        parts = [] if self.kernel is None else [self.kernel.attend(layer, query, scale)]
        by_token = query[0].transpose(0, 1)
        if self.short_spans is not None:
            parts.append(self.short_spans.attend(layer, by_token, key.shape[1], scale))
        parts += [span.attend(layer, by_token, scale) for span in self._long_spans]
        return _concat(parts).transpose(0, 1)[None]

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self.kernel is not None:
            self.kernel.write(layer, key, value)
        if self._kv_writers:
            new = _stack_kv(key, value)
            for writer in self._kv_writers:
                writer.write(layer, new)


class DeterministicLayout:
    """Layout of bitwise reproducible passes, in which every token attends alone, whatever else is in the pass.

    Rows must not share prefixes. Tokens after the last span are padding.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._kv_writers = _cache_writers(spans)
        self.kernel = _kernel_attention(spans)
        self._tokens = [
            (*span.row.locate(position)[:2], span.offset + i, position + 1)
            for span in (spans if self.kernel is None else ())
            for i, position in enumerate(range(span.begin, span.end))
        ]

    def store_hidden(self, states: Sequence[Tensor]) -> None:
        """Store the hidden states [T, H] of the pass."""
        for writer in self._kv_writers:
            writer.store_hidden(states)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Write the new keys and values, then return the output, computed token by token and zero for padding."""
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        if self.kernel is not None:
            self.kernel.write(layer, key, value)
            output = self.kernel.attend(layer, query, query.shape[-1] ** -0.5 if scale is None else scale)
            out[0, :, : len(output)] = output.transpose(0, 1)
            return out
        for writer in self._kv_writers:
            writer.write(layer, _stack_kv(key, value))
        for size_class, slot, offset, columns in self._tokens:
            stored_key, stored_value = size_class.kv[layer, :, slot, None, :, :columns]
            # Query heads that share a key head become further queries of it.
            grouped = query[:, :, offset].reshape(1, stored_key.shape[1], -1, query.shape[-1])
            seen = scaled_dot_product_attention(grouped, stored_key, stored_value, scale=scale)
            out[:, :, offset] = seen.flatten(1, 2)
        return out
