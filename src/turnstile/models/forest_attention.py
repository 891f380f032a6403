"""Three ways to compute the attention of a forest, all exact: token q sees token k iff `k <= q < subtree_end[k]`.

`by_nodes` is for CPUs. A *node* is a run of tokens that branches nowhere. It sees itself causally, and everything
that grows on it sees the whole of it; both are plain attention over slices of the layout, without a mask, and what
a token got from its own node and from each one below it is merged by the logarithms of their sums. So exactly the
pairs that see each other are computed, and a prompt's keys meet the queries of all its answers in one call.
`by_flex` is for CUDA: FlexAttention with a block mask. `by_runs` needs nothing but masks, and is for the rest.
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
    """Tokens [begin, end) that follow each other without a branch; [end, subtree_end) grow on them."""

    begin: int
    end: int
    subtree_end: int


def nodes_of(subtree_end: Tensor) -> list[Node]:
    """The nodes of a layout i64[T], in its order. A child without siblings ends where its parent's subtree does."""
    ends = subtree_end.tolist()
    starts = [i for i in range(len(ends)) if i == 0 or ends[i] != ends[i - 1]]
    return [Node(b, e, ends[b]) for b, e in itertools.pairwise([*starts, len(ends)])]


def can_go_by_nodes(query: Tensor, value: Tensor) -> bool:
    """Whether torch has, for these tensors, a kernel that also returns the logarithms of the sums."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and hasattr(_ATEN, _FLASH)


def by_nodes(query: Tensor, key: Tensor, value: Tensor, nodes: Sequence[Node], scale: float | None) -> Tensor:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, Hq, T, D]."""
    out: Tensor = _ByNodes.apply(query, key, value, nodes, scale)  # type: ignore[no-untyped-call]
    return out


_ATEN: Any = torch.ops.aten
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def _forward(
    query: Tensor, key: Tensor, value: Tensor, nodes: Sequence[Node], scale: float | None
) -> tuple[Tensor, Tensor]:
    """What attention gives [1, Hq, T, D], and the logarithm of each token's sum [1, Hq, T]."""
    flash = getattr(_ATEN, _FLASH)
    if len(nodes) == 1:
        only: tuple[Tensor, Tensor] = flash(query, key, value, 0.0, True, scale=scale)
        return only
    _, heads, length, width = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(1, length, heads, width, dtype=exact).transpose(1, 2)  # as the model goes on with it
    sums = query.new_empty(1, heads, length, dtype=exact)
    for begin, end, _ in nodes:
        own = slice(begin, end)
        q, k, v = query[:, :, own], key[:, :, own], value[:, :, own]
        out[:, :, own], sums[:, :, own] = flash(q, k, v, 0.0, True, scale=scale)
    for begin, end, last in nodes:
        if last > end:
            own, above = slice(begin, end), slice(end, last)
            part, part_sums = flash(query[:, :, above], key[:, :, own], value[:, :, own], 0.0, False, scale=scale)
            before = sums[:, :, above]
            out[:, :, above].lerp_(part.to(exact), torch.sigmoid(part_sums - before)[..., None])
            torch.logaddexp(before, part_sums, out=before)
    return out.to(query.dtype), sums


def _backward(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The slopes of queries [1, Hq, m, D], keys and values [1, Hkv, n, D] under that of what they gave.

    The kernel gives whole heads of keys to the threads, of which there may be too few to go round: then queries of one
    such head become a batch, each with the keys to itself.
    """
    flash_backward = getattr(_ATEN, f"{_FLASH}_backward")
    heads, kv_heads = query.shape[1], key.shape[1]
    group = heads // kv_heads
    if group * _rounds(kv_heads) <= _rounds(heads):
        found: tuple[Tensor, ...] = flash_backward(slope, query, key, value, out, sums, 0.0, causal, scale=scale)
        return found
    slope, query, out, sums = (x[0].unflatten(0, (-1, group)).transpose(0, 1) for x in (slope, query, out, sums))
    key, value = (x.expand(group, -1, -1, -1) for x in (key, value))
    of_query, *of_others = flash_backward(slope, query, key, value, out, sums, 0.0, causal, scale=scale)
    return of_query.transpose(0, 1).flatten(0, 1)[None], *(x.sum(dim=0, keepdim=True) for x in of_others)


def _rounds(tasks: int) -> int:
    """How often the threads that there are have to go for so many tasks."""
    return -(-tasks // torch.get_num_threads())


class _ByNodes(torch.autograd.Function):
    """The sums of all pieces are known when the backward pass begins, so that each piece's gradient is that of plain
    attention with these sums, and the gradients of pieces simply add up."""

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
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors

        def piece(above: slice, own: slice, causal: bool) -> tuple[Tensor, ...]:
            return _backward(
                slope[:, :, above], query[:, :, above], key[:, :, own], value[:, :, own], out[:, :, above],
                sums[:, :, above], causal, ctx.scale,
            )  # fmt: skip

        if len(ctx.nodes) == 1:
            return *piece(slice(None), slice(None), True), None, None
        slopes = [torch.empty_like(tensor) for tensor in (query, key, value)]
        for begin, end, _ in ctx.nodes:
            own = slice(begin, end)
            for whole, part in zip(slopes, piece(own, own, True), strict=True):
                whole[:, :, own] = part
        for begin, end, last in ctx.nodes:
            if last > end:
                own, above = slice(begin, end), slice(end, last)
                for whole, part, span in zip(slopes, piece(above, own, False), (above, own, own), strict=True):
                    whole[:, :, span] += part
        return *slopes, None, None


def attend_with_sums(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """query [B, H, m, D], key and value [B, H, n, D], bias [B, 1, m, n] put to the scores -> what is seen [B, H, m, D],
    and the logarithms of the sums [B, H, m] in at least float32: with them parts that were seen apart can be merged."""
    if can_go_by_nodes(query, value):
        seen, sums = getattr(_ATEN, _FLASH)(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
        return seen, sums.to(torch.promote_types(query.dtype, torch.float32))
    if goes_in_half(query.device.type, query.dtype, query.shape[-1]):
        return _in_half(query, key, value, bias, scale)
    return _plainly(query, key, value, bias, scale)


def _plainly(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The same by matrices, for which keys in half precision are copied to float32."""
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(exact) @ key.to(exact).transpose(-1, -2)).mul_(scale)  # one that is large is not rounded before
    if bias is not None:
        scores += bias
    sums = scores.logsumexp(dim=-1)
    return scores.sub_(sums[..., None]).exp_().to(value.dtype) @ value, sums


def _in_half(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The same by torch's memory-efficient kernel, which reads keys in half precision where they are kept."""
    if bias is not None:  # each row of it has to begin at a multiple of sixteen numbers
        columns = bias.shape[-1]
        bias = pad(bias, (0, -columns % 16))[..., :columns].expand(*query.shape[:-1], -1)
    seen, sums, *_ = _ATEN._scaled_dot_product_efficient_attention(query, key, value, bias, True, scale=scale)
    return seen, sums[..., : query.shape[-2]]  # there is room for a multiple of queries


@functools.cache
def goes_in_half(device: str, dtype: torch.dtype, width: int) -> bool:
    """Whether that kernel is there for such heads, and gives what matrices give: found out by trying."""
    if device != "cuda" or dtype.itemsize >= torch.float32.itemsize:
        return False
    numbers = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, count, width, generator=numbers, dtype=dtype, device=device) for count in (5, 37, 37)
    )
    bias = torch.zeros(2, 1, 5, 37, dtype=dtype, device=device)
    bias[..., 20:] = float("-inf")
    try:
        pairs = zip(_in_half(query, key, value, bias, 0.1), _plainly(query, key, value, bias, 0.1), strict=True)
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except RuntimeError as error:  # no kernel for this device or width
        _log.warning("kept keys are copied to float32 in each layer: %s", str(error).splitlines()[0])
        return False
    alike = all(torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2) for one, other in pairs)
    if not alike:
        _log.warning(
            "kept keys are copied to float32 in each layer: torch's attention gives other numbers on this device"
        )
    return alike


class Run(NamedTuple):
    """Tokens [begin, end) and what they see: slots i64[m + n], and which of them bool[n, m + n]; all and causally
    where there are none."""

    begin: int
    end: int
    slots: Tensor | None
    seen: Tensor | None


def runs_of(subtree_end: Tensor) -> list[Run]:
    """The runs of a layout i64[T] from one leaf to the next; all tokens of one have the same ancestors before it."""
    ends, device = subtree_end.cpu(), subtree_end.device  # copied once: each look at what lies on a GPU waits for it
    length = len(ends)
    starts = [0, *(torch.nonzero(ends[:-1] == torch.arange(1, length))[:, 0] + 1).tolist()]
    return [_run(ends, b, e, device) for b, e in itertools.pairwise([*starts, length])]


def _run(ends: Tensor, begin: int, end: int, device: torch.device) -> Run:
    ancestors = torch.nonzero(ends[:begin] > begin)[:, 0]
    if len(ancestors) == 0:
        return Run(begin, end, None, None)
    slots = torch.cat([ancestors, torch.arange(begin, end)]).to(device)
    seen = torch.ones(end - begin, len(slots), dtype=torch.bool, device=device).tril(len(ancestors))
    return Run(begin, end, slots, seen)


def by_runs(query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], scale: float | None) -> Tensor:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D'] -> [1, Hq, T, D']."""
    parts = []
    for begin, end, slots, seen in runs:
        run = slice(begin, end)
        k = key[:, :, run] if slots is None else key[:, :, slots]
        v = value[:, :, run] if slots is None else value[:, :, slots]
        parts.append(
            scaled_dot_product_attention(
                query[:, :, run], k, v, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def can_flex(query: Tensor, value: Tensor) -> bool:
    """Whether FlexAttention has a kernel for these tensors: CUDA from Ampere on, heads of 16 numbers or more, no double
    precision."""
    return (
        query.is_cuda
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and query.shape[-1] == value.shape[-1] >= 16
    )


BLOCK = 128
"""Tokens on a side of FlexAttention's blocks."""


def block_mask(subtree_end: Tensor) -> BlockMask:
    """Who sees whom in a layout i64[T], as FlexAttention takes it: blocks of tokens that see nothing of each other cost
    nothing, and where all see all nothing is masked.

    Made from blocks alone: the mask of T tokens by T would hold gigabytes for the lengths that it is for.
    """

    def sees(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < subtree_end[k])

    length = len(subtree_end)
    count = -(-length // BLOCK)
    ends = pad(subtree_end, (0, count * BLOCK - length)).view(count, BLOCK)
    index = torch.arange(count, device=subtree_end.device)
    before = index[None] < index[:, None]  # [of the queries, of the keys]
    first, last = index[:, None] * BLOCK, index[:, None] * BLOCK + BLOCK - 1
    some = before & (ends.amax(dim=1) > first)
    full = before & (ends.amin(dim=1) > last)  # a last block that is not whole never is: no subtree ends behind it
    part = (some & ~full) | (index[None] == index[:, None])
    return BlockMask.from_kv_blocks(
        *_listed(part), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool[n, n] -> how many of each row are meant, i32[1, 1, n], and which, those first, i32[1, 1, n, n]."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """Forests differ in length, so it is compiled for any."""
    return torch.compile(flex_attention, dynamic=True)


def by_flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, Hq, T, D]."""
    out: Tensor = compiled_flex()(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)
    return out
