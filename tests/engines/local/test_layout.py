"""Attention of one pass over many rows, against every token by itself; and how rows are put together."""

from __future__ import annotations

import random

import pytest
import torch

from turnstile.engines.local.cpu import compiled
from turnstile.engines.local.kv_cache import Memory, Row, Shape
from turnstile.engines.local.layout import FEW, RowsLayout, Span, lay_out

LAYERS, WIDTH = 2, 8


def shape(dtype: torch.dtype = torch.float64, kv_heads: int = 2) -> Shape:
    cpu = torch.device("cpu")
    return Shape(layers=LAYERS, kv_heads=kv_heads, head_dim=WIDTH, hidden=4, dtype=dtype, device=cpu)


SHAPE = shape()


def written(memory: Memory, length: int, base: Row | None = None) -> Row:
    """A row of `length` tokens of its own, computed already, which sees all of `base`."""
    row = Row(list(base.tokens) if base else [], base)
    assert memory.hold(row, length, (), must=True)
    assert row.shelf is not None
    kept = row.shelf.kv[:, :, row.place, :, :length]
    kept.copy_(torch.randn(kept.shape, dtype=torch.float64))
    row.tokens += [0] * length
    row.computed = len(row.tokens)
    return row


def going_on(memory: Memory, row: Row, count: int) -> Span:
    begin = len(row.tokens)
    assert memory.hold(row, begin + count - row.begin, (), must=True)
    row.tokens += [0] * count
    return Span(row, begin, begin + count)


def seen_by(row: Row, layer: int, end: int, query: torch.Tensor) -> torch.Tensor:
    """What one token [Hq, D] sees of the first `end` tokens of a row's path."""
    kv = torch.stack([shelf.kv[layer, :, place, :, at] for shelf, place, at in map(row.at, range(end))])  # [n, 2, H, D]
    key, value = kv.double().repeat_interleave(len(query) // kv.shape[2], dim=2).permute(1, 2, 0, 3)
    scores = (query.double()[:, None] * key).sum(-1) * WIDTH**-0.5
    return (scores.softmax(-1)[..., None] * value).sum(1)


@pytest.mark.parametrize(
    ("seed", "dtype", "heads", "kv_heads", "with_kernel"),
    [
        *((seed, torch.float64, 6, 2, True) for seed in range(8)),
        (0, torch.float64, 2, 2, True),
        (1, torch.float64, 6, 1, True),
        (2, torch.float64, 6, 2, False),  # as where no kernel gives the sums
        (3, torch.bfloat16, 6, 2, True),
        (4, torch.bfloat16, 6, 2, False),
        *((seed, torch.float32, 6, 2, True) for seed in range(8)),  # compiled
        (2, torch.float32, 6, 1, True),
        (2, torch.float32, 6, 2, False),  # as without numba
    ],
)
def test_a_token_sees_what_it_would_see_by_itself(
    seed: int, dtype: torch.dtype, heads: int, kv_heads: int, with_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernel:
        monkeypatch.setattr("turnstile.models.forest_attention.can_go_by_nodes", lambda *_: False)
        monkeypatch.setattr(compiled, "available", lambda: False)
    torch.manual_seed(seed)
    chance = random.Random(seed)
    memory = Memory(shape(dtype, kv_heads), 10**9)
    base, alone = written(memory, chance.randint(64, 300)), written(memory, 40)
    leaning = [written(memory, chance.randint(0, 200), base) for _ in range(9)]
    chosen = [row for row in leaning if chance.random() < 0.7]
    spans = [going_on(memory, row, chance.choice([1, 1, 1, 2, 5, 9, 30, FEW + 5])) for row in chosen]
    spans += [going_on(memory, row, chance.choice([1, 9, FEW])) for row in (base, alone)]
    spans = lay_out(spans)
    count = sum(span.size for span in spans)
    layout = RowsLayout(spans)
    few = any(span.few for span in spans)
    assert (layout.compiled is not None) == (few and dtype == torch.float32 and with_kernel and compiled.available())
    for layer in range(LAYERS):
        query = torch.randn(1, heads, count, WIDTH, dtype=torch.float64).to(dtype)
        key, value = torch.randn(2, 1, kv_heads, count, WIDTH, dtype=torch.float64).to(dtype)
        found = layout.attend(layer, query, key, value, None)[0]
        assert found.dtype == dtype
        for span in spans:
            for i in range(span.size):
                wanted = seen_by(span.row, layer, span.begin + i + 1, query[0, :, span.at + i])
                off = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
                torch.testing.assert_close(found[:, span.at + i].double(), wanted, rtol=off, atol=off)


@pytest.mark.parametrize(
    ("lengths", "counts", "stretches"),
    [
        ([10, 10, 10, 10], [1, 9, 1, 9], [(0, 4, 9)]),  # short rows are padded
        ([900, 900, 900, 900], [1, 9, 1, 9], [(0, 3, 1), (1, 2, 9), (3, 4, 9)]),  # long ones are told apart
        ([900, 900, 900, 900], [1, 9, 10, 1], [(0, 4, 1), (1, 3, 10)]),
        ([900] * 8, [1, 0, 0, 1, 0, 0, 0, 1], [(0, 4, 1), (7, 8, 1)]),  # few rows are computed for nothing
    ],
)
def test_rows_that_are_taken_together(
    lengths: list[int], counts: list[int], stretches: list[tuple[int, int, int]]
) -> None:
    memory = Memory(SHAPE, 10**9)
    rows = [written(memory, length) for length in lengths]
    layout = RowsLayout(
        lay_out([going_on(memory, row, count) for row, count in zip(rows, counts, strict=True) if count])
    )
    assert layout.together is not None
    assert [
        (block.stretch.begin, block.stretch.end, block.stretch.queries) for block in layout.together.own
    ] == stretches


def test_a_row_that_others_lean_on_is_asked_apart_once_it_is_long() -> None:
    """Else all that lean on it would be multiplied with all that it has gone on to say."""
    for more, asked in ((10, 1 + 8), (2000, 8)):
        memory = Memory(SHAPE, 10**9)
        base = written(memory, 100)
        leaning = [written(memory, 20, base) for _ in range(8)]
        going_on(memory, base, more)
        base.computed = len(base.tokens)
        layout = RowsLayout(lay_out([going_on(memory, row, 1) for row in (base, *leaning)]))
        assert layout.together is not None
        (shared,) = layout.together.shared
        assert shared.stretch.queries == asked
