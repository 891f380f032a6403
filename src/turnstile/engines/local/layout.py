"""Attention of one pass over new tokens of many rows (see `models.attention.Layout`).

Most rows get one token a pass, or a few with guesses at the next. A compiled kernel takes those token by token
(`engines/local/cpu/compiled.py`). Where there is none they are attended to together, shelf by shelf: rows that lean on
the same other row see that one in a single product, and the two parts of what they see are put together by the masses
of their softmaxes. Longer runs of tokens, of prompts and observations, are taken one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from turnstile.engines.local.attention_tiles import WASTE, Query, Stretch, columns_seen, stretches
from turnstile.engines.local.cpu.compiled import Attention, Part, can_compute
from turnstile.engines.local.kv_cache import Row, SizeClass
from turnstile.models.forest_attention import attend_with_sums

FEW = 64
"""Tokens of one row that are attended to together with those of others."""


@dataclass(slots=True, eq=False)
class Span:
    """New tokens of one row in one pass: positions begin..end-1 of its path, lying at `at` in the flat run."""

    row: Row
    begin: int
    end: int
    at: int = 0

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def few(self) -> bool:
        return self.size <= FEW

    @property
    def tokens(self) -> list[int]:
        return self.row.tokens[self.begin : self.end]

    @property
    def run(self) -> slice:
        return slice(self.at, self.at + self.size)


def lay_out(spans: Sequence[Span]) -> list[Span]:
    """The spans in the order in which they are computed, with their places in it: short ones first, by shelf."""

    def order(span: Span) -> tuple[bool, int, int, int]:
        assert span.row.shelf is not None
        return not span.few, span.row.shelf.capacity, span.row.shelf.number, span.row.place

    ordered, at = sorted(spans, key=order), 0
    for span in ordered:
        span.at = at
        at += span.size
    return ordered


def _places(places: Sequence[int], device: torch.device) -> slice | Tensor:
    """What indexes a tensor at `places`: without a copy where they follow each other."""
    first = places[0] if places else 0
    if list(places) == list(range(first, first + len(places))):
        return slice(first, first + len(places))
    return torch.tensor(places, device=device)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _side_by_side(key: Tensor, value: Tensor) -> Tensor:
    """key and value [1, Hkv, T, D] -> [T, 2, Hkv, D]."""
    return torch.stack((key[0], value[0])).permute(2, 0, 1, 3)


class _Writes:
    """Where the new keys and values of one shelf go."""

    def __init__(self, shelf: SizeClass, spans: Sequence[Span]) -> None:
        device = shelf.kv.device
        few = [(span, i) for span in spans if span.few for i in range(span.size)]
        self._shelf = shelf
        self._kept = shelf.kv.unbind()
        self._any = bool(few)
        self._from = _places([span.at + i for span, i in few], device)
        self._rows = torch.tensor([span.row.place for span, _ in few], device=device)
        self._columns = torch.tensor([span.begin + i - span.row.begin for span, i in few], device=device)
        self._longer = [
            (span.run, span.row.place, slice(span.begin - span.row.begin, span.end - span.row.begin))
            for span in spans
            if not span.few
        ]

    def write(self, layer: int, new: Tensor) -> None:
        """new [T, 2, Hkv, D], from `_side_by_side`."""
        kept = self._kept[layer]
        if self._any:
            kept[:, self._rows, :, self._columns] = new[self._from]
        for run, row, columns in self._longer:
            kept[:, row, :, columns] = new[run].permute(1, 2, 0, 3)

    def keep(self, states: Sequence[Tensor]) -> None:
        """Keeps the hidden states [T, H] of the new tokens: the last, then the trunk's if there is one."""
        for kept, state in zip(self._shelf.hidden, states, strict=True):
            if self._any:
                kept[self._rows, self._columns] = state[self._from]
            for run, row, columns in self._longer:
                kept[row, columns] = state[run]


class _Block:
    """A stretch of a shelf, with m queries for each row, some of which may stand for nothing."""

    def __init__(self, shelf: SizeClass, stretch: Stretch, queries: Sequence[Sequence[Query]]) -> None:
        padded = [[*row, *[(0, 0)] * (stretch.queries - len(row))] for row in queries]
        self.stretch, self.device = stretch, shelf.kv.device
        self.queries = [query for row in padded for query in row]
        kept = shelf.kv[:, :, stretch.begin : stretch.end, :, : stretch.columns]
        self._keys, self._values = (part.unbind() for part in kept.unbind(1))  # [R, Hkv, columns, D] of each layer
        self._bias: Tensor | None = None  # [R, 1, m, 1, columns]; none where all see all
        if any(seen < stretch.columns for _, seen in self.queries):
            limits = torch.tensor([[max(seen, 1) for _, seen in row] for row in padded], device=self.device)
            hidden = (torch.arange(stretch.columns, device=self.device) >= limits[..., None])[:, None, :, None]
            self._bias = torch.zeros(hidden.shape, dtype=kept.dtype, device=self.device)
            self._bias.masked_fill_(hidden, float("-inf"))
        self._each: Tensor | None = None

    def attend(self, layer: int, asked: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """asked [Hkv, R * m * G, D], where the G heads that share their keys are further queries -> what they see
        [R * m * G, Hkv, D] and the logs of their masses [R * m * G, Hkv]."""
        key, value = self._keys[layer], self._values[layer]
        asked = asked.unflatten(1, (len(key), -1)).transpose(0, 1)
        if self._bias is not None and self._each is None:  # the same for every layer
            heads = asked.shape[2] // self.stretch.queries
            self._each = self._bias.expand(-1, -1, -1, heads, -1).flatten(2, 3)
        seen, mass = attend_with_sums(asked, key, value, self._each, scale)
        return seen.transpose(1, 2).flatten(0, 1), mass.transpose(1, 2).flatten(0, 1)


class _Together:
    """Few tokens of each of many rows: every one sees its own row, and what that leans on."""

    def __init__(self, queries: Sequence[tuple[Row, int, int]]) -> None:
        """For each token, in the order of the flat run: its row, its place in the run, and where its path ends."""
        own: dict[Row, list[Query]] = {}
        asked: dict[Row, list[Query]] = {}  # of rows that others lean on
        for row, at, end in queries:
            own.setdefault(row, []).append((at, end - row.begin))
            if row.base is not None:
                asked.setdefault(row.base, []).append((at, row.begin))
        for row in own.keys() & asked.keys():
            if len(asked[row]) * (columns_seen(own[row]) - columns_seen(asked[row])) <= WASTE:
                asked[row] += own.pop(row)
        self.own = [_Block(*one) for one in stretches(own)]
        self.shared = [_Block(*one) for one in stretches(asked)]
        flat = [query for block in (*self.own, *self.shared) for query in block.queries]
        parts: dict[int, list[int]] = {}
        for i, (at, seen) in enumerate(flat):
            if seen:
                parts.setdefault(at, []).append(i)
        device = (*self.own, *self.shared)[0].device
        self._asked = _places([at for at, _ in flat], device)
        self._first = _places([parts[at][0] for _, at, _ in queries], device)
        self._last = _places([parts[at][-1] for _, at, _ in queries], device)  # the same where a token sees one part
        self._merged = any(len(part) > 1 for part in parts.values())

    def attend(self, layer: int, query: Tensor, kv_heads: int, scale: float) -> Tensor:
        """query [T, Hq, D] -> [n, Hq, D], for the first n of the run."""
        asked = query[self._asked].unflatten(1, (kv_heads, -1))
        heads = asked.shape[2]
        blocks = (*self.own, *self.shared)
        pieces = asked.transpose(0, 1).flatten(1, 2).split([len(block.queries) * heads for block in blocks], dim=1)
        found = [block.attend(layer, piece, scale) for block, piece in zip(blocks, pieces, strict=True)]
        seen, mass = (_joined(parts).unflatten(0, (-1, heads)) for parts in zip(*found, strict=True))
        out: Tensor = seen[self._first]
        if self._merged:
            share = (mass[self._last] - mass[self._first]).sigmoid_()[..., None]
            out = torch.lerp(out.to(share.dtype), seen[self._last].to(share.dtype), share).to(out.dtype)
        return out.transpose(1, 2).flatten(1, 2)


class _Run:
    """Several new tokens of one row: each sees the row's path and those of them that come before it."""

    def __init__(self, span: Span) -> None:
        row = span.row
        held = [(row, span.end - row.begin)]
        if row.base is not None:
            held.insert(0, (row.base, row.begin))
        self._held = [(*part.at(part.begin)[:2], columns) for part, columns in held]
        self._span = span
        before = torch.ones(span.size, span.end, dtype=torch.bool, device=self._held[0][0].kv.device)
        self._seen = before.tril(span.begin) if span.begin else None

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """query [T, Hq, D] -> [n, Hq, D]."""
        held = [shelf.kv[layer, :, place, :, :columns] for shelf, place, columns in self._held]
        key, value = held[0] if len(held) == 1 else torch.cat(held, dim=2)
        asked = query[self._span.run].transpose(0, 1)
        seen = scaled_dot_product_attention(
            asked[None], key[None], value[None], attn_mask=self._seen, is_causal=self._seen is None, scale=scale,
            enable_gqa=True,
        )  # fmt: skip
        return seen[0].transpose(0, 1)


def _compiled(spans: Sequence[Span]) -> Attention | None:
    """Attention of spans that are laid out from the beginning of a run, by compiled kernels; None where those are not
    for such numbers."""
    if not spans or not can_compute(spans[0].row.at(spans[0].begin)[0].kv):
        return None
    seen: list[list[Part]] = []
    for span in spans:
        assert span.at == len(seen), "spans are laid out one after the other"
        shelf, place, column = span.row.at(span.begin)
        before: list[Part] = []
        if span.row.base is not None and span.row.begin > 0:
            held, other, _ = span.row.at(0)
            before = [(held.kv, other, span.row.begin)]
        seen += [[*before, (shelf.kv, place, column + i + 1)] for i in range(span.size)]
    return Attention(seen)


def _writes(spans: Sequence[Span]) -> list[_Writes]:
    shelves = {span.row.shelf for span in spans if span.row.shelf is not None}
    return [_Writes(shelf, [span for span in spans if span.row.shelf is shelf]) for shelf in shelves]


class RowsLayout:
    """Who sees whom in one pass over `spans`, which are laid out."""

    def __init__(self, spans: Sequence[Span]) -> None:
        few, longer = ([span for span in spans if span.few is few] for few in (True, False))
        self._keeps = _writes(spans)
        self.compiled = _compiled(few)
        self._writes = self._keeps if self.compiled is None else _writes(longer)
        self.together = None
        if few and self.compiled is None:
            tokens = [(span.row, span.at + i, span.begin + i + 1) for span in few for i in range(span.size)]
            self.together = _Together(tokens)
        self._runs = [_Run(span) for span in longer]

    def keep(self, states: Sequence[Tensor]) -> None:
        """Keeps the hidden states [T, H] of the pass."""
        for writes in self._keeps:
            writes.keep(states)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        self._write(layer, key, value)  # all first: a row may lean on tokens of this very pass
        parts = [] if self.compiled is None else [self.compiled.attend(layer, query, scale)]
        by_token = query[0].transpose(0, 1)
        if self.together is not None:
            parts.append(self.together.attend(layer, by_token, key.shape[1], scale))
        parts += [run.attend(layer, by_token, scale) for run in self._runs]
        return _joined(parts).transpose(0, 1)[None]

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self.compiled is not None:
            self.compiled.write(layer, key, value)
        if self._writes:
            new = _side_by_side(key, value)
            for writes in self._writes:
                writes.write(layer, new)


class LonelyLayout:
    """The same for passes that repeat bit by bit: every token sees its own row by itself, whatever else there is.

    Rows must not lean on others. Tokens behind the last span stand for nothing.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._writes = _writes(spans)
        self.compiled = _compiled(spans)
        self._tokens = [
            (*span.row.at(position)[:2], span.at + i, position + 1)
            for span in (spans if self.compiled is None else ())
            for i, position in enumerate(range(span.begin, span.end))
        ]

    def keep(self, states: Sequence[Tensor]) -> None:
        """Keeps the hidden states [T, H] of the pass."""
        for writes in self._writes:
            writes.keep(states)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        if self.compiled is not None:
            self.compiled.write(layer, key, value)
            found = self.compiled.attend(layer, query, query.shape[-1] ** -0.5 if scale is None else scale)
            out[0, :, : len(found)] = found.transpose(0, 1)
            return out
        for writes in self._writes:
            writes.write(layer, _side_by_side(key, value))
        for shelf, place, at, seen in self._tokens:
            kept_key, kept_value = shelf.kv[layer, :, place, None, :, :seen]
            asked = query[:, :, at].reshape(1, kept_key.shape[1], -1, query.shape[-1])  # heads that share keys, as rows
            out[:, :, at] = scaled_dot_product_attention(asked, kept_key, kept_value, scale=scale).flatten(1, 2)
        return out
