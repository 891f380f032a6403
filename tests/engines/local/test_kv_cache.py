"""Rows keep their contents as they grow and move, within the memory limit."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from torch import Tensor

from networks import network
from turnstile.engines.local import kv_cache as engine_memory
from turnstile.engines.local.kv_cache import CacheRow, CacheShape, KVCache, cache_shape_of
from turnstile.errors import ConfigError
from turnstile.models.allocator import zeros

SHAPE = CacheShape(layers=2, kv_heads=1, head_dim=4, hidden=3, dtype=torch.float32, device=torch.device("cpu"))
LIMIT = 12_000 * SHAPE.bytes_per_token


def put(row: CacheRow, begin: int, count: int) -> None:
    """Write numbers that identify the row and the column."""
    size_class = row.size_class
    assert size_class is not None
    values = torch.arange(begin, begin + count, dtype=torch.float32) + id(row) % 1000
    size_class.kv[:, :, row.slot, :, begin : begin + count] = values[:, None]
    size_class.hidden[:, row.slot, begin : begin + count] = values[:, None]
    row.tokens += [0] * count
    row.computed = len(row.tokens)


def is_whole(row: CacheRow) -> bool:
    size_class, count = row.size_class, len(row.tokens)
    assert size_class is not None
    values = torch.arange(count, dtype=torch.float32) + id(row) % 1000
    kv, hidden = size_class.kv[:, :, row.slot, :, :count], size_class.hidden[:, row.slot, :count]
    return bool((kv == values[:, None]).all()) and bool((hidden == values[:, None]).all())


def test_accepts_values_as_wide_as_keys() -> None:
    model = network("minicpm3", kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
    assert cache_shape_of(model).head_dim == 12


def test_rejects_values_of_another_width_than_keys() -> None:
    model = network("minicpm3", kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    with pytest.raises(ConfigError, match="model family 'minicpm3' has values of another width than its keys"):
        cache_shape_of(model)


@pytest.fixture
def peak_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of all live cache tensors: now, and at the peak."""
    allocated = [0, 0]

    def tracked_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = zeros(shape, dtype, device)
        allocated[0] += tensor.nbytes
        allocated[1] = max(allocated)
        weakref.finalize(tensor, freed, tensor.nbytes)
        return tensor

    def freed(size: int) -> None:
        allocated[0] -= size

    monkeypatch.setattr(engine_memory, "zeros", tracked_zeros)
    return allocated


@pytest.mark.parametrize("seed", range(4))
def test_growing_rows_stay_within_the_limit(seed: int, peak_bytes: list[int]) -> None:
    """Also while they are copied, and with most of the memory in use."""
    rng, memory = random.Random(seed), KVCache(SHAPE, LIMIT)
    used = []
    rows: list[CacheRow] = []
    for clock in range(150):
        if len(rows) < 8:
            rows.append(CacheRow([]))
        row = rng.choice(rows)
        count = rng.randint(1, 120)
        if memory.reserve(row, len(row.tokens) + count, {row}, force=False):
            put(row, len(row.tokens), count)
            row.touch(clock)
        rows = [row for row in rows if row.size_class is not None]
        assert peak_bytes[0] == memory.bytes <= peak_bytes[1] <= LIMIT
        used.append(sum(size_class.occupied * size_class.row_bytes for size_class in memory._size_classes))
        assert all(is_whole(row) for row in rows)
    assert memory.take_evicted() > 0
    assert max(used) > 0.7 * LIMIT


@pytest.mark.parametrize("tokens", [100, 700, 3000])
def test_rows_of_one_size_use_nearly_all_memory(tokens: int, peak_bytes: list[int]) -> None:
    memory, rows = KVCache(SHAPE, LIMIT), [CacheRow([]) for _ in range(100)]
    fit = 0
    for row in rows:
        if memory.reserve(row, tokens, rows, force=False):
            put(row, 0, tokens)
            fit += 1
    assert all(is_whole(row) for row in rows[:fit])
    row_bytes = rows[0].size_class.row_bytes  # type: ignore[union-attr]
    assert fit == min(100, LIMIT // row_bytes)
    assert peak_bytes[1] <= LIMIT


def test_forced_reservation_exceeds_the_limit() -> None:
    memory, row = KVCache(SHAPE, 200 * SHAPE.bytes_per_token), CacheRow([])
    assert not memory.reserve(row, 300, {row}, force=False)
    assert memory.reserve(row, 300, {row}, force=True)
    put(row, 0, 300)
    assert memory.reserve(row, 600, {row}, force=True)
    assert is_whole(row)


def test_size_class_is_made_large_enough_for_neighbours() -> None:
    """Otherwise it would be enlarged, and all its rows copied, for each of them."""
    memory, rows = KVCache(SHAPE, LIMIT), [CacheRow([]) for _ in range(6)]
    for row in rows:
        assert memory.reserve(row, 100, {row}, force=True)
        put(row, 0, 100)
    assert memory.reserve(rows[0], 200, {rows[0]}, force=True)
    size_class = rows[0].size_class
    assert size_class is not None
    kept = size_class.kv
    for row in rows:
        assert memory.reserve(row, 200, {row}, force=True)
        assert row.size_class is size_class
        assert is_whole(row)
    assert size_class.kv is kept


def grow_to(memory: KVCache, row: CacheRow, tokens: int) -> int:
    """Return the capacity of the slot of a row that grows to `tokens`."""
    assert memory.reserve(row, tokens, {row}, force=False)
    put(row, len(row.tokens), tokens - len(row.tokens))
    assert row.size_class is not None
    return row.size_class.capacity


def test_rows_grow_by_four_while_memory_is_ample() -> None:
    memory, rows = KVCache(SHAPE, 4 * 4 * 512 * SHAPE.bytes_per_token), [CacheRow([]) for _ in range(3)]
    assert [grow_to(memory, row, 100) for row in rows] == [128] * 3
    assert [grow_to(memory, row, 200) for row in rows] == [512] * 3
    assert grow_to(memory, CacheRow([]), 200) == 256  # it may be a prompt that is not continued
    assert grow_to(memory, rows[0], 600) == 1024
    assert all(is_whole(row) for row in rows)


def test_rows_that_grow_one_after_another_are_not_evicted() -> None:
    """Each finds ample memory when it grows; together they must not fill it with empty slots."""
    memory, rows = KVCache(SHAPE, 40 * 256 * SHAPE.bytes_per_token), [CacheRow([]) for _ in range(32)]
    capacities = []
    for row in rows:
        assert grow_to(memory, row, 100) == 128
        capacities.append(grow_to(memory, row, 200))
    assert memory.take_evicted() == 0
    assert set(capacities) == {256, 512}
    assert all(is_whole(row) for row in rows)
