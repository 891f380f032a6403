"""Rows keep what they hold as they grow and move, within the memory that is allowed."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from torch import Tensor

from networks import network
from turnstile.engines.local import kv_cache as engine_memory
from turnstile.engines.local.kv_cache import Memory, Row, Shape, shape_of
from turnstile.errors import ConfigError
from turnstile.models.allocator import zeros

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


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of all shelves' tensors that are there at once: now, and at the most."""
    held = [0, 0]

    def counted(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        made = zeros(shape, dtype, device)
        held[0] += made.nbytes
        held[1] = max(held)
        weakref.finalize(made, gone, made.nbytes)
        return made

    def gone(size: int) -> None:
        held[0] -= size

    monkeypatch.setattr(engine_memory, "zeros", counted)
    return held


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_grow(seed: int, most: list[int]) -> None:
    """Within the limit also while they are copied, and with most of it in use."""
    chance, memory = random.Random(seed), Memory(SHAPE, LIMIT)
    used = []
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
        assert most[0] == memory.bytes <= most[1] <= LIMIT
        used.append(sum(shelf.occupied * shelf.row_bytes for shelf in memory._shelves))
        assert all(is_whole(row) for row in rows)
    assert memory.take_dropped() > 0
    assert max(used) > 0.7 * LIMIT


@pytest.mark.parametrize("tokens", [100, 700, 3000])
def test_nearly_all_memory_is_for_rows_of_one_size(tokens: int, most: list[int]) -> None:
    memory, rows = Memory(SHAPE, LIMIT), [Row([]) for _ in range(100)]
    fit = 0
    for row in rows:
        if memory.hold(row, tokens, rows, must=False):
            put(row, 0, tokens)
            fit += 1
    assert all(is_whole(row) for row in rows[:fit])
    row_bytes = rows[0].shelf.row_bytes  # type: ignore[union-attr]
    assert fit == min(100, LIMIT // row_bytes)
    assert most[1] <= LIMIT


def test_what_must_be_held_is_held() -> None:
    memory, row = Memory(SHAPE, 200 * SHAPE.bytes_per_token), Row([])
    assert not memory.hold(row, 300, {row}, must=False)
    assert memory.hold(row, 300, {row}, must=True)
    put(row, 0, 300)
    assert memory.hold(row, 600, {row}, must=True)
    assert is_whole(row)


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


def grown(memory: Memory, row: Row, tokens: int) -> int:
    """The capacity of the place that a row of so many tokens is on."""
    assert memory.hold(row, tokens, {row}, must=False)
    put(row, len(row.tokens), tokens - len(row.tokens))
    assert row.shelf is not None
    return row.shelf.capacity


def test_rows_grow_by_four_while_memory_is_plentiful() -> None:
    memory, rows = Memory(SHAPE, 4 * 4 * 512 * SHAPE.bytes_per_token), [Row([]) for _ in range(3)]
    assert [grown(memory, row, 100) for row in rows] == [128] * 3
    assert [grown(memory, row, 200) for row in rows] == [512] * 3
    assert grown(memory, Row([]), 200) == 256  # it may be a prompt that nobody goes on with
    assert grown(memory, rows[0], 600) == 1024
    assert all(is_whole(row) for row in rows)


def test_rows_that_follow_each_other_are_not_dropped_for_want_of_the_room_that_they_could_take() -> None:
    """Each finds plenty of memory when it grows; all together must not take it for places that stay empty."""
    memory, rows = Memory(SHAPE, 40 * 256 * SHAPE.bytes_per_token), [Row([]) for _ in range(32)]
    found = []
    for row in rows:
        assert grown(memory, row, 100) == 128
        found.append(grown(memory, row, 200))
    assert memory.take_dropped() == 0
    assert set(found) == {256, 512}
    assert all(is_whole(row) for row in rows)
