"""Rows keep what they hold as they grow and move, within the memory that is allowed."""

from __future__ import annotations

import random

import pytest
import torch

from networks import network
from turnstile.engines.memory import Memory, Row, Shape, shape_of
from turnstile.errors import ConfigError

SHAPE = Shape(layers=2, kv_heads=1, head_dim=4, hidden=3, dtype=torch.float32, device=torch.device("cpu"))
LIMIT = 12_000 * SHAPE.bytes_per_token


def put(row: Row, begin: int, count: int) -> None:
    """Writes numbers that tell the row and the place."""
    shelf = row.shelf
    assert shelf is not None
    told = torch.arange(begin, begin + count, dtype=torch.float32) + id(row) % 1000
    shelf.kv[:, :, row.place, :, begin : begin + count] = told[:, None]
    shelf.hidden[:, row.place, begin : begin + count] = told[:, None]
    row.tokens += [0] * count
    row.computed = len(row.tokens)


def is_whole(row: Row) -> bool:
    shelf, count = row.shelf, len(row.tokens)
    assert shelf is not None
    told = torch.arange(count, dtype=torch.float32) + id(row) % 1000
    kv, hidden = shelf.kv[:, :, row.place, :, :count], shelf.hidden[:, row.place, :count]
    return bool((kv == told[:, None]).all()) and bool((hidden == told[:, None]).all())


def test_values_as_wide_as_keys_are_taken_whatever_the_width_is_called() -> None:
    model = network("minicpm3", kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
    assert shape_of(model).head_dim == 12


def test_values_of_another_width_than_keys_are_refused() -> None:
    model = network("minicpm3", kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    with pytest.raises(ConfigError, match="model family 'minicpm3' has values of another width than its keys"):
        shape_of(model)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_grow(seed: int) -> None:
    chance, memory = random.Random(seed), Memory(SHAPE, LIMIT)
    rows: list[Row] = []
    for clock in range(150):
        if len(rows) < 8:
            rows.append(Row([]))
        row = chance.choice(rows)
        count = chance.randint(1, 120)
        if memory.hold(row, len(row.tokens) + count, {row}, must=False):
            put(row, len(row.tokens), count)
            row.use(clock)
        rows = [row for row in rows if row.shelf is not None]
        assert memory.bytes <= LIMIT
        assert all(is_whole(row) for row in rows)
    assert memory.take_dropped() > 0


def test_a_shelf_is_made_for_those_that_will_follow() -> None:
    """Else it would be made anew for each of them, and all its rows copied."""
    memory, rows = Memory(SHAPE, LIMIT), [Row([]) for _ in range(6)]
    for row in rows:
        assert memory.hold(row, 100, {row}, must=True)
        put(row, 0, 100)
    assert memory.hold(rows[0], 200, {rows[0]}, must=True)
    shelf = rows[0].shelf
    assert shelf is not None
    kept = shelf.kv
    for row in rows:
        assert memory.hold(row, 200, {row}, must=True)
        assert row.shelf is shelf
        assert is_whole(row)
    assert shelf.kv is kept


@pytest.mark.parametrize(("rows", "capacity"), [(1, 512), (6, 256)])
def test_rows_grow_by_more_while_memory_is_plentiful(rows: int, capacity: int) -> None:
    """Six that took 512 places each would take 3,072 of the 12,000 that there are."""
    memory, held = Memory(SHAPE, LIMIT), [Row([]) for _ in range(rows)]
    for row in held:
        assert memory.hold(row, 100, {row}, must=True)
        assert row.shelf is not None
        assert row.shelf.capacity == 128
    assert memory.hold(held[0], 200, {held[0]}, must=True)
    assert held[0].shelf.capacity == capacity
