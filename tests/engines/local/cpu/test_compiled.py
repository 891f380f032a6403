"""Compiled kernels against the same arithmetic in float64."""

from __future__ import annotations

import importlib.util
import logging
import math
import random
import re

import pytest
import torch
from torch import Tensor

from turnstile.engines.local.cpu import compiled
from turnstile.engines.local.cpu import thread_pool as teams
from turnstile.engines.local.cpu.compiled import CacheSegment, KernelAttention

pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")

LAYERS = 3


def kept(rows: int, columns: int, kv_heads: int, width: int) -> Tensor:
    return torch.randn(LAYERS, 2, rows, kv_heads, columns, width)


def by_token(x: Tensor) -> Tensor:
    """Return x [T, heads, D] as [1, heads, T, D], strided as a projection returns it."""
    return x.transpose(0, 1)[None]


def seen(parts: list[CacheSegment], layer: int, query: Tensor, scale: float) -> Tensor:
    """Return the attention output of one token [Hq, D]."""
    key, value = torch.cat([kv[layer, :, row, :, :columns] for kv, row, columns in parts], dim=2).double()
    groups = len(query) // len(key)
    scores = (key.repeat_interleave(groups, 0) @ query.double()[..., None])[..., 0] * scale
    return (scores.softmax(-1)[:, None] @ value.repeat_interleave(groups, 0))[:, 0]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 8), (6, 1, 128), (14, 2, 80), (2, 1, 7), (3, 3, 1)]
)
def test_attention_matches_float64(heads: int, kv_heads: int, width: int, threads: int) -> None:
    torch.manual_seed(0)
    chance = random.Random(heads)
    long, short = kept(3, 400, kv_heads, width), kept(40, 21, kv_heads, width)
    parts: list[list[CacheSegment]] = [[(short, i, i % 21 + 1)] for i in range(40)]
    for each in parts:
        if chance.random() < 0.6:
            each.insert(0, (long, chance.randrange(3), chance.randint(1, 400)))
    attention = KernelAttention(parts)
    assert attention.count == 40
    for layer in range(LAYERS):
        everything = torch.randn(50, heads + 2 * kv_heads, width)  # ten tokens more than these
        query, key, value = by_token(everything).tensor_split((heads, heads + kv_heads), dim=1)
        wanted_short, wanted_long = short.clone(), long.clone()
        for i, (*_, (_, row, columns)) in enumerate(parts):
            wanted_short[layer, :, row, :, columns - 1] = torch.stack((key[0, :, i], value[0, :, i]))
        attention.write(layer, key, value)
        assert long.equal(wanted_long)
        assert short.equal(wanted_short)  # and nothing else was written
        found = attention.attend(layer, query, width**-0.5)
        assert found.shape == (40, heads, width)
        for i, each in enumerate(parts):
            wanted = seen(each, layer, query[0, :, i], width**-0.5)
            torch.testing.assert_close(found[i].double(), wanted, rtol=1e-5, atol=2e-6)


def test_large_scores() -> None:
    """Softmax of scores that are far apart or far from zero."""
    torch.manual_seed(1)
    kv = 30 * kept(2, 50, 2, 16)
    parts = [[(kv, 0, 50)], [(kv, 1, 1)]]
    query = by_token(30 * torch.randn(2, 4, 16))
    found = KernelAttention(parts).attend(1, query, 0.25)
    for i, each in enumerate(parts):
        torch.testing.assert_close(found[i].double(), seen(each, 1, query[0, :, i], 0.25), rtol=1e-4, atol=1e-4)


def test_token_output_is_independent_of_others_and_threads() -> None:
    """To the last bit."""
    torch.manual_seed(2)
    kv, base = kept(24, 90, 3, 64), kept(1, 300, 3, 64)
    parts: list[list[CacheSegment]] = [[(base, 0, 300), (kv, i, 3 * i + 1)] for i in range(24)]
    query = by_token(torch.randn(24, 9, 64))
    whole = KernelAttention(parts).attend(0, query, 0.125)
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert KernelAttention(parts).attend(0, query, 0.125).equal(whole)
            for i in (0, 7, 23):
                assert KernelAttention([parts[i]]).attend(0, query[:, :, i : i + 1], 0.125)[0].equal(whole[i])
    finally:
        torch.set_num_threads(before)
        teams.release_torch_threads()


def test_negligible_scores_add_nothing() -> None:
    """A tile whose scores are all -inf, before other tiles."""
    kv = kept(1, 300, 1, 4).abs()
    kv[0, 0, 0, :, :200] = float("-inf")
    query = torch.ones(1, 1, 1, 4)
    found = KernelAttention([[(kv, 0, 300)]]).attend(0, query, 0.5)
    torch.testing.assert_close(found[0].double(), seen([(kv, 0, 300)], 0, query[0, :, 0], 0.5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_survives(what: float, where: str) -> None:
    torch.manual_seed(6)
    kv = kept(2, 40, 2, 16)
    query = torch.randn(1, 4, 2, 16)
    query[0, :, 0, 3].abs_()  # minus infinity would count nothing
    if where == "query":
        query[0, 1, 0, 3] = what
    else:
        kv[0, ("key", "value").index(where), 0, 0, 7, 3] = what
    found = KernelAttention([[(kv, 0, 40)], [(kv, 1, 40)]]).attend(0, query, 0.25)
    wanted = seen([(kv, 0, 40)], 0, query[0, :, 0], 0.25).isfinite()
    assert not wanted.all()
    assert found[0].isfinite().equal(wanted)
    assert found[1].isfinite().all()


def test_strided_inputs() -> None:
    torch.manual_seed(3)
    kv = kept(5, 9, 2, 8)
    parts: list[list[CacheSegment]] = [[(kv, i, i + 1)] for i in range(5)]
    query, key, value = (torch.randn(1, heads, 8, 5).transpose(2, 3) for heads in (4, 2, 2))
    attention = KernelAttention(parts)
    attention.write(2, key, value)
    found = attention.attend(2, query, 1.0)
    for i, each in enumerate(parts):
        assert kv[2, 0, i, :, i].equal(key[0, :, i])
        torch.testing.assert_close(found[i].double(), seen(each, 2, query[0, :, i], 1.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("vocabulary", "temperature"), [(5, 1.0), (256, 1.0), (1000, 0.6), (49152, 1.0), (49152, 2.0)])
def test_tokens_are_drawn_by_inversion(vocabulary: int, temperature: float, threads: int) -> None:
    torch.manual_seed(4)
    logits = 4 * torch.randn(6, vocabulary)
    logits[1, vocabulary // 2 :] = float("-inf")
    logits[2] += 1000
    logits[3, :-1] -= 200  # nothing but the last
    chance = random.Random(5)
    rows = [chance.randrange(6) for _ in range(300)]
    draws = [chance.choice([0.0, 1 - 2**-53, *(chance.random() for _ in range(8))]) for _ in rows]
    p = (logits.double() / temperature).softmax(-1)
    entropies, behind = torch.special.entr(p).sum(-1), p.cumsum(-1)
    found = compiled.draw(logits, rows, draws, temperature)
    for row, u, (token, logprob, entropy) in zip(rows, draws, found, strict=True):
        assert p[row, token] > 0
        assert float(behind[row, token] - p[row, token]) - 1e-6 <= u <= float(behind[row, token]) + 1e-6
        assert logprob == pytest.approx(float(p[row, token].log()), abs=2e-5)
        assert entropy == pytest.approx(float(entropies[row]), abs=2e-5)
    assert [compiled.draw(logits, rows[i : i + 1], draws[i : i + 1], temperature)[0] for i in range(20)] == found[:20]


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_entropy_is_nan_for_non_finite_logits(what: float) -> None:
    logits = torch.randn(3, 700)
    logits[1, 650] = what
    logits[2] = float("-inf")
    entropies = [entropy for _, _, entropy in compiled.draw(logits, [0, 1, 2], [0.5, 0.5, 0.5], 1.0)]
    assert [math.isnan(entropy) for entropy in entropies] == [False, True, True]


def test_unavailable_without_libgomp(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is faster there, since it has all the threads."""
    monkeypatch.setattr(compiled, "has_torch_threads", lambda: False)
    compiled.is_available.cache_clear()
    try:
        assert not compiled.can_compute(torch.zeros(1))
    finally:
        compiled.is_available.cache_clear()


@pytest.mark.parametrize(
    ("layer", "query", "said"),
    [
        (0, torch.zeros(1, 4, 8, 16, dtype=torch.bfloat16), "torch.bfloat16"),
        (0, torch.zeros(1, 4, 8, 17), "need torch.float32 (1, 4, None, 16)"),
        (0, torch.zeros(1, 3, 8, 16), "need torch.float32 (1, 2, None, 16)"),
        (0, torch.zeros(1, 4, 7, 16), "7 tokens for layer 0: the cache holds 8 tokens, 3 layers"),
        (3, torch.zeros(1, 4, 8, 16), "8 tokens for layer 3: the cache holds 8 tokens, 3 layers"),
    ],
)
def test_rejects_wrong_shapes(layer: int, query: Tensor, said: str) -> None:
    """Otherwise kernels would read and write out of bounds."""
    kv = kept(8, 30, 2, 16)
    attention = KernelAttention([[(kv, i, 30)] for i in range(8)])
    with pytest.raises(ValueError, match=re.escape(said)):
        attention.attend(layer, query, 0.25)
    with pytest.raises(ValueError):
        attention.write(layer, query[:, :1], query[:, :1])
    for other in (kept(8, 30, 2, 8), kv.double(), kv.transpose(4, 5).contiguous().transpose(4, 5)):
        with pytest.raises(ValueError, match="cached: "):
            KernelAttention([[(kv, 0, 30), (other, 1, 3)]])
    for rows, draws in (([3], [0.5]), ([-1], [0.5]), ([0], [0.5, 0.5])):
        with pytest.raises(ValueError, match="of 3"):
            compiled.draw(torch.zeros(3, 5), rows, draws, 1.0)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        compiled.draw(torch.zeros(3, 5, dtype=torch.float64), [0], [0.5], 1.0)


def test_kernel_that_does_not_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example for lack of memory: otherwise stale output would be taken for the result."""
    monkeypatch.setattr(compiled, "in_torch_threads", lambda *_: None)
    with pytest.raises(MemoryError, match="kernel draw could not start"):
        compiled.draw(torch.ones(3, 4), [0], [0.5], 1.0)


def test_supports_float32_on_a_cpu_only() -> None:
    assert compiled.can_compute(torch.zeros(1))
    assert not compiled.can_compute(torch.zeros(1, dtype=torch.float64))
    assert not compiled.can_compute(torch.zeros(1, device="meta"))


def test_broken_numba_is_logged_and_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(name: str) -> None:
        raise ImportError("Numba needs NumPy 2.3 or less. Got NumPy 9.9.\nAnd more.")

    monkeypatch.setattr(importlib, "import_module", broken)
    compiled.is_available.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not compiled.can_compute(torch.zeros(1))
            assert not compiled.can_compute(torch.zeros(1))
    finally:
        compiled.is_available.cache_clear()
    (record,) = caplog.records  # once
    assert record.getMessage() == (
        "numba is installed but does not work here, so sampling on this CPU is slower "
        "(ImportError: Numba needs NumPy 2.3 or less. Got NumPy 9.9.)"
    )


def test_missing_numba_is_not_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    compiled.is_available.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not compiled.can_compute(torch.zeros(1))
    finally:
        compiled.is_available.cache_clear()
    assert not caplog.records
