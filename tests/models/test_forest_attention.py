"""Every way to compute a forest's attention matches a dense mask, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from networks import random_rows
from turnstile.batching.batch import Batch
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.weights import token as token_weights
from turnstile.models import attention, forest_attention
from turnstile.models.attention import ForestLayout
from turnstile.models.forest_attention import (
    Node,
    attend_by_nodes,
    attend_by_runs,
    attend_with_sums,
    block_mask,
    can_attend_by_flex,
    can_attend_by_nodes,
    nodes_of,
    runs_of,
)


def forest(seed: int = 0, *, share: bool = True) -> Batch:
    rows = random_rows(9, seed=seed, trunk=20, private=25)
    (batch,) = pack_prefix_trees(rows, token_weights(rows), budget=10_000, share=share)
    return batch


def tensors(length: int, dtype: torch.dtype, *, heads: tuple[int, int] = (4, 2), value: int = 8) -> list[Tensor]:
    """Return query, key and value as a model returns them, with heads strided behind tokens."""
    draw = torch.Generator().manual_seed(length)
    shapes = [(heads[0], 8), (heads[1], 8), (heads[1], value)]
    made = [torch.randn(1, length, h, d, dtype=torch.float64, generator=draw).to(dtype) for h, d in shapes]
    return [each.transpose(1, 2).requires_grad_() for each in made]


def seen(ends: Tensor) -> Tensor:
    """Return which tokens see which, bool[T, T], by the layout's definition."""
    index = torch.arange(len(ends))
    return (index[None] <= index[:, None]) & (index[:, None] < ends[None])


def dense(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, scale: float | None) -> Tensor:
    return scaled_dot_product_attention(query, key, value, attn_mask=seen(ends), scale=scale, enable_gqa=True)


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Compare the outputs, and the gradients of the inputs."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    slope = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        torch.autograd.grad((found * slope).sum(), inputs),
        torch.autograd.grad((expected * slope).sum(), inputs),
        rtol=0, atol=1e-11,
    )  # fmt: skip


WAYS: dict[str, Callable[..., Tensor]] = {
    "nodes": lambda q, k, v, ends, scale: attend_by_nodes(q, k, v, nodes_of(ends), scale),
    "runs": lambda q, k, v, ends, scale: attend_by_runs(q, k, v, runs_of(ends), scale),
}


def test_nodes_by_hand() -> None:
    """a with b below it, then c and d (with e) below b; then another tree."""
    assert nodes_of(torch.tensor([5, 5, 3, 5, 5, 7, 7])) == [
        Node(0, 2, 5), Node(2, 3, 3), Node(3, 5, 5), Node(5, 7, 7),
    ]  # fmt: skip
    assert nodes_of(torch.tensor([], dtype=torch.int64)) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_matches_a_dense_mask(way: str, share: bool, scale: float | None, seed: int) -> None:
    batch = forest(seed, share=share)
    inputs = tensors(batch.size, torch.float64)
    found, expected = (f(*inputs, batch.subtree_end, scale) for f in (WAYS[way], dense))
    assert_same(found, expected, inputs)


def test_sums_merge_separate_parts() -> None:
    """With and without a kernel (single precision has one here; values of another width have none)."""
    draw = torch.Generator().manual_seed(0)
    bf16 = torch.bfloat16
    for dtype, value, near in ((torch.float32, 8, 1e-5), (torch.float64, 5, 1e-12), (bf16, 8, 0.02), (bf16, 5, 0.02)):
        made = [torch.randn(2, 3, n, d, dtype=dtype, generator=draw) for n, d in ((4, 8), (9, 8), (9, value))]
        query, key, x = made
        bias = torch.zeros(2, 1, 4, 9, dtype=dtype)
        bias[1, :, :, 7:] = float("-inf")
        whole, _ = attend_with_sums(query, key, x, bias, 0.5)
        left, right = (
            attend_with_sums(query, key[:, :, part], x[:, :, part], bias[..., part], 0.5)
            for part in (slice(0, 5), slice(5, 9))
        )
        assert left[1].dtype == torch.promote_types(dtype, torch.float32)
        merged = torch.lerp(left[0], right[0], (right[1] - left[1]).sigmoid()[..., None].to(dtype))
        torch.testing.assert_close(merged, whole, rtol=0, atol=near)
        exact = scaled_dot_product_attention(query, key, x, attn_mask=bias, scale=0.5)
        torch.testing.assert_close(whole, exact, rtol=0, atol=near)


def test_large_scores_in_half_precision_keep_their_differences() -> None:
    """Some families have keys far from zero: all scores are large, and only their differences count."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, d, generator=draw) for n, d in ((4, 64), (9, 64), (9, 5)))
    query, key, value = (x.to(torch.bfloat16) for x in (query + 4, key + 4, value))
    found, sums = attend_with_sums(query, key, value, None, 0.125)
    scores = (query.double() @ key.double().transpose(-1, -2)) * 0.125
    assert float(scores.mean()) > 100
    torch.testing.assert_close(sums.double(), scores.logsumexp(-1), rtol=0, atol=1e-3)
    torch.testing.assert_close(found.double(), scores.softmax(-1) @ value.double(), rtol=0, atol=0.02)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1), (9, 3)])
@pytest.mark.parametrize("share", [True, False])
def test_groups_of_heads(heads: tuple[int, int], share: bool, threads: int) -> None:
    """The number of threads decides which heads are batched in the backward pass."""
    batch = forest(share=share)
    inputs = tensors(batch.size, torch.float64, heads=heads)
    found, expected = (
        attend_by_nodes(*inputs, nodes_of(batch.subtree_end), None),
        dense(*inputs, batch.subtree_end, None),
    )
    assert_same(found, expected, inputs)


def test_parts_are_merged_in_single_precision() -> None:
    """In bfloat16 the result is as exact as a single call's rounding, however many parts a token merges."""
    batch = forest()
    inputs = tensors(batch.size, torch.bfloat16)
    found = attend_by_nodes(*inputs, nodes_of(batch.subtree_end), None)
    exact = dense(*(each.double() for each in inputs), batch.subtree_end, None)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() < 2 * (exact.bfloat16() - exact).abs().max()
    assert all(each.isfinite().all() for each in torch.autograd.grad(found.float().sum(), inputs))


def test_flex_attention_mask_matches() -> None:
    """Its kernels need CUDA; its mask, and its computation without a kernel, run anywhere."""
    batch = forest()
    mask = block_mask(batch.subtree_end)
    inputs = [each.detach() for each in tensors(batch.size, torch.float32)]
    nothing = torch.tensor(0)
    index = torch.arange(batch.size)
    told = mask.mask_mod(nothing, nothing, index[:, None], index[None])
    assert torch.equal(told, seen(batch.subtree_end))
    with pytest.warns(UserWarning, match="without torch.compile"):
        found = flex_attention(*inputs, block_mask=mask, scale=0.7, enable_gqa=True)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, dense(*inputs, batch.subtree_end, 0.7), rtol=0, atol=1e-5)
    assert not can_attend_by_flex(inputs[0], inputs[2])


@pytest.mark.parametrize(
    ("trunk", "private", "share"), [(400, 300, True), (300, 200, False), (2, 3, True), (600, 20, True)]
)
def test_block_mask_matches_the_dense_mask(trunk: int, private: int, share: bool) -> None:
    """Partial and full blocks equal those that torch finds in the dense mask."""
    rows = random_rows(5, seed=trunk, trunk=trunk, private=private)
    (batch,) = pack_prefix_trees(rows, token_weights(rows), budget=10_000, share=share)
    mask, length = block_mask(batch.subtree_end), batch.size
    expected = create_block_mask(mask.mask_mod, None, None, length, length, device="cpu")
    assert mask.shape == expected.shape
    assert trunk != 400 or int(expected.full_kv_num_blocks.sum()) > 0  # type: ignore[union-attr]
    assert torch.equal(mask.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name


@pytest.mark.parametrize("width", [8, 4])
def test_layout_uses_the_available_kernel(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel (for values of another width, here), masked runs are used."""
    batch = forest()
    inputs = tensors(batch.size, torch.float64, value=width)
    taken = []
    for name in ("attend_by_nodes", "attend_by_runs", "attend_by_flex"):
        way = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *a, way=way, name=name: (taken.append(name), way(*a))[1])
    found = ForestLayout(batch).attend(0, *inputs, None)
    torch.testing.assert_close(found, dense(*inputs, batch.subtree_end, None), rtol=0, atol=1e-12)
    assert can_attend_by_nodes(inputs[0], inputs[2]) == (width == 8)
    assert taken == ["attend_by_nodes" if width == 8 else "attend_by_runs"]


class Efficient:
    """Torch's memory-efficient kernel as documented, computed plainly.

    Rows of the bias must begin at multiples of sixteen numbers, and sums are padded to a multiple of 32 queries.
    """

    def _scaled_dot_product_efficient_attention(
        self, query: Any, key: Any, value: Any, bias: Any, with_sums: bool, *, scale: float
    ) -> tuple[Any, ...]:
        assert with_sums
        assert {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}  # nothing was copied to float32
        scores = query.float() @ key.float().mT * scale
        if bias is not None:
            assert bias.shape == scores.shape
            assert all(stride % 16 == 0 for stride in bias.stride()[:-1])
            scores = scores + bias
        sums = scores.logsumexp(dim=-1)
        short = -sums.shape[-1] % 32
        padded = torch.nn.functional.pad(sums, (0, short), value=float("nan"))
        return scores.softmax(dim=-1).bfloat16() @ value, padded, None, None


@pytest.mark.parametrize("masked", [False, True])
def test_half_precision_keys_are_read_in_place_on_cuda(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(2, 3, n, 16).bfloat16() for n in (5, 37, 37))
    bias = torch.zeros(2, 1, 5, 37).bfloat16() if masked else None
    if bias is not None:
        bias[..., 11:] = float("-inf")
    wanted = forest_attention._attend_by_matmul(query, key, value, bias, 0.25)
    monkeypatch.setattr(forest_attention, "_ATEN", Efficient())
    found = forest_attention._attend_efficiently(query, key, value, bias, 0.25)
    assert [each.shape for each in found] == [each.shape for each in wanted]
    torch.testing.assert_close(found[0].float(), wanted[0].float(), rtol=0, atol=2e-2)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-5)
    assert not forest_attention.has_efficient_kernel("cpu", torch.bfloat16, 16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("width", [64, 128])
def test_cuda_has_the_efficient_kernel(width: int) -> None:
    assert forest_attention.has_efficient_kernel("cuda", torch.bfloat16, width)
