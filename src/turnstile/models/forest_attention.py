"""Three exact ways to compute the attention of a forest, where token q sees token k iff `k <= q < subtree_end[k]`.

`attend_by_nodes` is for CPUs. A *node* is a run of tokens without a branch. It sees itself causally, and every token of
the subtree below sees all of it; both are plain attention over slices of the layout, without a mask. A token's outputs
over its own node and over each ancestor node are merged by their log-sum-exps. So only visible pairs are computed, and
a prompt's keys meet the queries of all its completions in one call. `attend_by_flex` is for CUDA and uses FlexAttention
with a block mask. `attend_by_runs` needs only masks, and serves all other devices.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

_log = logging.getLogger(__name__)


class Node(NamedTuple):
    """Consecutive tokens [begin, end) without a branch; [end, subtree_end) is the subtree below them."""

    begin: int
    end: int
    subtree_end: int


def nodes_of(subtree_end: Tensor) -> list[Node]:
    """Return the nodes of a layout, in its order, from `subtree_end` i64[T].

    A token without siblings has the same subtree end as its parent, so it belongs to its parent's node.
    """
    ends = subtree_end.tolist()
    starts = [i for i in range(len(ends)) if i == 0 or ends[i] != ends[i - 1]]
    return [Node(b, e, ends[b]) for b, e in itertools.pairwise([*starts, len(ends)])]


def can_attend_by_nodes(query: Tensor, value: Tensor) -> bool:
    """Return whether torch has an attention kernel for these tensors that also returns log-sum-exps."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and hasattr(_ATEN, _FLASH)


def attend_by_nodes(query: Tensor, key: Tensor, value: Tensor, nodes: Sequence[Node], scale: float | None) -> Tensor:
    """Return the attention output [1, Hq, T, D] of query [1, Hq, T, D], key and value [1, Hkv, T, D]."""
    out: Tensor = _ByNodes.apply(query, key, value, nodes, scale)  # type: ignore[no-untyped-call]
    return out


_ATEN: Any = torch.ops.aten
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def _forward(
    query: Tensor, key: Tensor, value: Tensor, nodes: Sequence[Node], scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the attention output [1, Hq, T, D] and the log-sum-exp of each token's scores [1, Hq, T]."""
    flash = getattr(_ATEN, _FLASH)
    if len(nodes) == 1:
        only: tuple[Tensor, Tensor] = flash(query, key, value, 0.0, True, scale=scale)
        return only
    _, heads, length, width = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    # In memory this is [1, T, Hq, D], as the model reads it next.
    out = query.new_empty(1, length, heads, width, dtype=exact).transpose(1, 2)
    sums = query.new_empty(1, heads, length, dtype=exact)
    for begin, end, _ in nodes:
        own = slice(begin, end)
        q, k, v = query[:, :, own], key[:, :, own], value[:, :, own]
        out[:, :, own], sums[:, :, own] = flash(q, k, v, 0.0, True, scale=scale)
    for begin, end, last in nodes:
        if last > end:
            own, after = slice(begin, end), slice(end, last)
            part, part_sums = flash(query[:, :, after], key[:, :, own], value[:, :, own], 0.0, False, scale=scale)
            before = sums[:, :, after]
            out[:, :, after].lerp_(part.to(exact), torch.sigmoid(part_sums - before)[..., None])
            torch.logaddexp(before, part_sums, out=before)
    return out.to(query.dtype), sums


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of query [1, Hq, m, D], key and value [1, Hkv, n, D], given that of the output.

    The kernel assigns whole key heads to threads, and there may be fewer key heads than threads. Where that takes
    longer, the query heads of each key head become a batch, each with its own view of the keys.
    """
    flash_backward = getattr(_ATEN, f"{_FLASH}_backward")
    heads, kv_heads = query.shape[1], key.shape[1]
    group = heads // kv_heads
    if group * _num_rounds(kv_heads) <= _num_rounds(heads):
        grads: tuple[Tensor, ...] = flash_backward(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
        return grads
    grad, query, out, lse = (x[0].unflatten(0, (-1, group)).transpose(0, 1) for x in (grad, query, out, lse))
    key, value = (x.expand(group, -1, -1, -1) for x in (key, value))
    query_grad, *other_grads = flash_backward(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
    return query_grad.transpose(0, 1).flatten(0, 1)[None], *(x.sum(dim=0, keepdim=True) for x in other_grads)


def _num_rounds(tasks: int) -> int:
    """Return how many rounds torch's threads need for this number of tasks."""
    return -(-tasks // torch.get_num_threads())


class _ByNodes(torch.autograd.Function):
    """Attention by nodes, with its gradient.

    The log-sum-exps over all pieces are known when the backward pass begins. So the gradient of each piece is that of
    plain attention with these log-sum-exps, and the gradients of all pieces add up.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, nodes: Sequence[Node], scale: float | None
    ) -> Tensor:
        out, sums = _forward(query, key, value, nodes, scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.nodes, ctx.scale = nodes, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors

        def piece_grads(after: slice, own: slice, causal: bool) -> tuple[Tensor, ...]:
            return _backward(
                grad[:, :, after], query[:, :, after], key[:, :, own], value[:, :, own], out[:, :, after],
                sums[:, :, after], causal, ctx.scale,
            )  # fmt: skip

        if len(ctx.nodes) == 1:
            return *piece_grads(slice(None), slice(None), True), None, None
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for begin, end, _ in ctx.nodes:
            own = slice(begin, end)
            for whole, part in zip(grads, piece_grads(own, own, True), strict=True):
                whole[:, :, own] = part
        for begin, end, last in ctx.nodes:
            if last > end:
                own, after = slice(begin, end), slice(end, last)
                for whole, part, span in zip(grads, piece_grads(after, own, False), (after, own, own), strict=True):
                    whole[:, :, span] += part
        return *grads, None, None


def attend_with_sums(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, m, D] of non-causal attention, and the log-sum-exps [B, H, m] in at least float32.

    query is [B, H, m, D], key and value [B, H, n, D], and bias [B, 1, m, n] is added to the scores. With the
    log-sum-exps, parts that were attended to separately can be merged.
    """
    if can_attend_by_nodes(query, value):
        output, sums = getattr(_ATEN, _FLASH)(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
        return output, sums.to(torch.promote_types(query.dtype, torch.float32))
    if has_efficient_kernel(query.device.type, query.dtype, query.shape[-1]):
        return _attend_efficiently(query, key, value, bias, scale)
    return _attend_by_matmul(query, key, value, bias, scale)


def _attend_by_matmul(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `attend_with_sums` by matrix products, which copy keys in half precision to float32."""
    exact = torch.promote_types(query.dtype, torch.float32)
    # In float32, since large scores would be rounded.
    scores = (query.to(exact) @ key.to(exact).transpose(-1, -2)).mul_(scale)
    if bias is not None:
        scores += bias
    sums = scores.logsumexp(dim=-1)
    return scores.sub_(sums[..., None]).exp_().to(value.dtype) @ value, sums


def _attend_efficiently(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `attend_with_sums` by torch's memory-efficient kernel, which reads half-precision keys in place."""
    if bias is not None:  # the kernel needs rows aligned to 16 elements
        columns = bias.shape[-1]
        bias = pad(bias, (0, -columns % 16))[..., :columns].expand(*query.shape[:-1], -1)
    output, sums, *_ = _ATEN._scaled_dot_product_efficient_attention(query, key, value, bias, True, scale=scale)
    return output, sums[..., : query.shape[-2]]  # the kernel pads the queries


@functools.cache
def has_efficient_kernel(device: str, dtype: torch.dtype, width: int) -> bool:
    """Return whether the memory-efficient kernel runs on heads of this width and agrees with matrix products.

    This is found out by trying. It is used only on CUDA and in half precision.
    """
    if device != "cuda" or dtype.itemsize >= torch.float32.itemsize:
        return False
    numbers = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, count, width, generator=numbers, dtype=dtype, device=device) for count in (5, 37, 37)
    )
    bias = torch.zeros(2, 1, 5, 37, dtype=dtype, device=device)
    bias[..., 20:] = float("-inf")
    try:
        arguments = (query, key, value, bias, 0.1)
        pairs = zip(_attend_efficiently(*arguments), _attend_by_matmul(*arguments), strict=True)
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except RuntimeError as error:  # no kernel for this device or width
        _log.warning("cached keys are copied to float32 in each layer: %s", str(error).splitlines()[0])
        return False
    agrees = all(torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2) for one, other in pairs)
    if not agrees:
        _log.warning("cached keys are copied to float32 in each layer: torch's kernel is inexact on this device")
    return agrees


class LeafRun(NamedTuple):
    """A run of n tokens [begin, end), the `slots` i64[m + n] that they see, and a mask bool[n, m + n] of those.

    The slots are those of the m ancestors and of the run itself. Without slots and mask, the run sees only itself,
    causally.
    """

    begin: int
    end: int
    slots: Tensor | None
    visible: Tensor | None


def runs_of(subtree_end: Tensor) -> list[LeafRun]:
    """Split a layout with `subtree_end` i64[T] into runs that each end at a leaf.

    All tokens of a run have the same ancestors before the run.
    """
    ends, device = subtree_end.cpu(), subtree_end.device  # copied once: each access to a GPU tensor waits for the GPU
    length = len(ends)
    starts = [0, *(torch.nonzero(ends[:-1] == torch.arange(1, length))[:, 0] + 1).tolist()]
    return [_leaf_run(ends, b, e, device) for b, e in itertools.pairwise([*starts, length])]


def _leaf_run(ends: Tensor, begin: int, end: int, device: torch.device) -> LeafRun:
    ancestors = torch.nonzero(ends[:begin] > begin)[:, 0]
    if len(ancestors) == 0:
        return LeafRun(begin, end, None, None)
    slots = torch.cat([ancestors, torch.arange(begin, end)]).to(device)
    visible = torch.ones(end - begin, len(slots), dtype=torch.bool, device=device).tril(len(ancestors))
    return LeafRun(begin, end, slots, visible)


def attend_by_runs(query: Tensor, key: Tensor, value: Tensor, runs: Sequence[LeafRun], scale: float | None) -> Tensor:
    """Return the output [1, Hq, T, D'] of query [1, Hq, T, D], key [1, Hkv, T, D] and value [1, Hkv, T, D']."""
    parts = []
    for begin, end, slots, visible in runs:
        run = slice(begin, end)
        k = key[:, :, run] if slots is None else key[:, :, slots]
        v = value[:, :, run] if slots is None else value[:, :, slots]
        parts.append(
            scaled_dot_product_attention(
                query[:, :, run], k, v, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=True
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def can_attend_by_flex(query: Tensor, value: Tensor) -> bool:
    """Return whether FlexAttention has a kernel for these tensors.

    It needs an NVIDIA GPU from Ampere on, queries and values of the same width of at least 16, and at most float32.
    """
    return (
        query.is_cuda
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and query.shape[-1] == value.shape[-1] >= 16
    )


BLOCK = 128
"""Side of FlexAttention's blocks, in tokens."""


def block_mask(subtree_end: Tensor) -> BlockMask:
    """Return FlexAttention's block mask of a layout with `subtree_end` i64[T].

    Invisible blocks cost nothing, and fully visible ones need no mask. The block mask is built from blocks alone, since
    a mask [T, T] would take gigabytes at the lengths that it is meant for.
    """

    def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < subtree_end[k])

    length = len(subtree_end)
    count = -(-length // BLOCK)
    ends = pad(subtree_end, (0, count * BLOCK - length)).view(count, BLOCK)
    index = torch.arange(count, device=subtree_end.device)
    before = index[None] < index[:, None]  # [query blocks, key blocks]
    first, last = index[:, None] * BLOCK, index[:, None] * BLOCK + BLOCK - 1
    some = before & (ends.amax(dim=1) > first)
    full = before & (ends.amin(dim=1) > last)  # never for an incomplete last block: no subtree ends after it
    part = (some & ~full) | (index[None] == index[:, None])
    return BlockMask.from_kv_blocks(
        *_list_blocks(part), *_list_blocks(full), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's number of True entries, i32[1, 1, n], and its columns, True ones first, i32[1, 1, n, n]."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """Return FlexAttention compiled for dynamic shapes, since forests differ in length."""
    return torch.compile(flex_attention, dynamic=True)


def attend_by_flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """Return the attention output [1, Hq, T, D] of query [1, Hq, T, D], key and value [1, Hkv, T, D]."""
    out: Tensor = compiled_flex()(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
    return out
