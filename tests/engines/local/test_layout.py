"""Attention of one pass over many rows against single tokens, and the grouping of rows into tiles."""

from __future__ import annotations

import random

import pytest
import torch

from turnstile.engines.local.cpu import compiled
from turnstile.engines.local.kv_cache import CacheRow, CacheShape, KVCache
from turnstile.engines.local.layout import SHORT_SPAN, CacheLayout, Span, lay_out

LAYERS, WIDTH = 2, 8


def shape(dtype: torch.dtype = torch.float64, kv_heads: int = 2) -> CacheShape:
    cpu = torch.device("cpu")
    return CacheShape(layers=LAYERS, kv_heads=kv_heads, head_dim=WIDTH, hidden=4, dtype=dtype, device=cpu)


SHAPE = shape()


def filled_row(cache: KVCache, length: int, base: CacheRow | None = None) -> CacheRow:
    """Return a computed row with `length` tokens of its own that shares all of `base`."""
    row = CacheRow(list(base.tokens) if base else [], base)
    assert cache.reserve(row, length, (), force=True)
    assert row.size_class is not None
    kept = row.size_class.kv[:, :, row.slot, :, :length]
    kept.copy_(torch.randn(kept.shape, dtype=torch.float64))
    row.tokens += [0] * length
    row.computed = len(row.tokens)
    return row


def extend_row(cache: KVCache, row: CacheRow, count: int) -> Span:
    begin = len(row.tokens)
    assert cache.reserve(row, begin + count - row.begin, (), force=True)
    row.tokens += [0] * count
    return Span(row, begin, begin + count)


def attend_naively(row: CacheRow, layer: int, end: int, query: torch.Tensor) -> torch.Tensor:
    """Return the output for one token [Hq, D] over the first `end` tokens of a row's path."""
    stored = [size_class.kv[layer, :, slot, :, column] for size_class, slot, column in map(row.locate, range(end))]
    kv = torch.stack(stored)  # [n, 2, H, D]
    key, value = kv.double().repeat_interleave(len(query) // kv.shape[2], dim=2).permute(1, 2, 0, 3)
    scores = (query.double()[:, None] * key).sum(-1) * WIDTH**-0.5
    return (scores.softmax(-1)[..., None] * value).sum(1)


@pytest.mark.parametrize(
    ("seed", "dtype", "heads", "kv_heads", "with_kernel"),
    [
        *((seed, torch.float64, 6, 2, True) for seed in range(8)),
        (0, torch.float64, 2, 2, True),
        (1, torch.float64, 6, 1, True),
        (2, torch.float64, 6, 2, False),  # no kernel returns log-sum-exps
        (3, torch.bfloat16, 6, 2, True),
        (4, torch.bfloat16, 6, 2, False),
        *((seed, torch.float32, 6, 2, True) for seed in range(8)),  # compiled
        (2, torch.float32, 6, 1, True),
        (2, torch.float32, 6, 2, False),  # as without numba
    ],
)
def test_batched_attention_matches_single_tokens(
    seed: int, dtype: torch.dtype, heads: int, kv_heads: int, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernel:
        monkeypatch.setattr("turnstile.models.forest_attention.can_attend_by_nodes", lambda *_: False)
        monkeypatch.setattr(compiled, "is_available", lambda: False)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    cache = KVCache(shape(dtype, kv_heads), 10**9)
    base, unshared = filled_row(cache, rng.randint(64, 300)), filled_row(cache, 40)
    dependents = [filled_row(cache, rng.randint(0, 200), base) for _ in range(9)]
    chosen = [row for row in dependents if rng.random() < 0.7]
    spans = [extend_row(cache, row, rng.choice([1, 1, 1, 2, 5, 9, 30, SHORT_SPAN + 5])) for row in chosen]
    spans += [extend_row(cache, row, rng.choice([1, 9, SHORT_SPAN])) for row in (base, unshared)]
    spans = lay_out(spans)
    count = sum(span.size for span in spans)
    layout = CacheLayout(spans)
    any_short = any(span.is_short for span in spans)
    assert (layout.kernel is not None) == (
        any_short and dtype == torch.float32 and with_kernel and compiled.is_available()
    )
    for layer in range(LAYERS):
        query = torch.randn(1, heads, count, WIDTH, dtype=torch.float64).to(dtype)
        key, value = torch.randn(2, 1, kv_heads, count, WIDTH, dtype=torch.float64).to(dtype)
        output = layout.attend(layer, query, key, value, None)[0]
        assert output.dtype == dtype
        for span in spans:
            for i in range(span.size):
                expected = attend_naively(span.row, layer, span.begin + i + 1, query[0, :, span.offset + i])
                off = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
                torch.testing.assert_close(output[:, span.offset + i].double(), expected, rtol=off, atol=off)


@pytest.mark.parametrize(
    ("lengths", "counts", "tiles"),
    [
        ([10, 10, 10, 10], [1, 9, 1, 9], [(0, 4, 9)]),  # short rows are padded
        ([900, 900, 900, 900], [1, 9, 1, 9], [(0, 3, 1), (1, 2, 9), (3, 4, 9)]),  # long rows are separated
        ([900, 900, 900, 900], [1, 9, 10, 1], [(0, 4, 1), (1, 3, 10)]),
        ([900] * 8, [1, 0, 0, 1, 0, 0, 0, 1], [(0, 4, 1), (7, 8, 1)]),  # few empty slots are computed
    ],
)
def test_rows_are_grouped_into_tiles(lengths: list[int], counts: list[int], tiles: list[tuple[int, int, int]]) -> None:
    cache = KVCache(SHAPE, 10**9)
    rows = [filled_row(cache, length) for length in lengths]
    layout = CacheLayout(
        lay_out([extend_row(cache, row, count) for row, count in zip(rows, counts, strict=True) if count])
    )
    assert layout.short_spans is not None
    assert [(block.tile.begin, block.tile.end, block.tile.queries) for block in layout.short_spans.own_tiles] == tiles


def test_long_shared_rows_get_a_tile_of_their_own() -> None:
    """Otherwise all dependents would be multiplied with everything that the shared row sampled later."""
    for more, num_queries in ((10, 1 + 8), (2000, 8)):
        cache = KVCache(SHAPE, 10**9)
        base = filled_row(cache, 100)
        dependents = [filled_row(cache, 20, base) for _ in range(8)]
        extend_row(cache, base, more)
        base.computed = len(base.tokens)
        layout = CacheLayout(lay_out([extend_row(cache, row, 1) for row in (base, *dependents)]))
        assert layout.short_spans is not None
        (shared,) = layout.short_spans.shared_tiles
        assert shared.tile.queries == num_queries
