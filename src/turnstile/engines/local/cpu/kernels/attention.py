"""Attention of single tokens over the cached keys and values."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray

from turnstile.engines.local.cpu.kernel_args import AttendArgs, WriteArgs
from turnstile.engines.local.cpu.kernels.base import (
    LINE,
    address_of,
    compiled,
    exp,
    fetch,
    floats,
    highest_of,
    integers,
    kernel_of,
    take,
)

SEGMENT_FIELDS = 5
"""Fields of a cache segment.

They are the address of the keys of its first layer; the offsets in bytes of the values, of the next layer and of the
next head; and the number of columns seen.
"""

TILE = 128
"""Columns whose keys and values are in the first-level cache at once."""


@compiled
def _keys_at(segment: Any, layer: Any, head: Any) -> Any:
    """Return the address of the keys of a segment i64[SEGMENT_FIELDS] for a layer and key head."""
    return segment[0] + layer * segment[2] + head * segment[3]


@compiled
def _segment_arrays(segment: Any, layer: Any, head: Any, width: Any) -> Any:
    """Return the keys and values f32[columns, width] of a segment i64[SEGMENT_FIELDS] for a layer and key head."""
    keys = _keys_at(segment, layer, head)
    shape = (segment[4], width)
    return carray(floats(keys), shape), carray(floats(keys + segment[1]), shape)


@compiled
def _fetch_columns(address: Any, begin: Any, end: Any, width: Any) -> None:
    """Prefetch columns begin..end-1 of keys or values f32[columns, width] at an address.

    The next columns load while the current ones are in use, since the hardware prefetcher stops at the end of a page.
    """
    size = width * 4  # bytes of a column
    for line in range(address + begin * size, address + end * size, LINE):
        fetch(line)


@compiled
def _exponentiate(scores: Any, highest: Any, scale: Any) -> Any:
    """Replace scores f32[n] by e^(scale (score - highest)) and return their sum."""
    total = np.float32(0)
    for column in range(len(scores)):
        scores[column] = exp((scores[column] - highest) * scale)
        total += scores[column]
    return total


# `heads` and `width` are constants of each kernel (see `attend`).


@compiled
def _score(queries: Any, keys: Any, prefetch: Any, scores: Any, heads: Any, width: Any) -> None:
    """Write the products of queries f32[heads, width] and keys f32[n, width] to scores f32[heads, n].

    Computes four columns at a time, whose sums do not wait for each other. `prefetch` is the address to load next.
    """
    fours = len(keys) // 4 * 4
    for column in range(0, fours, 4):
        _fetch_columns(prefetch, column, column + 4, width)
        for query in range(heads):
            a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(width):
                a += queries[query, i] * keys[column, i]
                b += queries[query, i] * keys[column + 1, i]
                c += queries[query, i] * keys[column + 2, i]
                d += queries[query, i] * keys[column + 3, i]
            scores[query, column], scores[query, column + 1] = a, b
            scores[query, column + 2], scores[query, column + 3] = c, d
    for column in range(fours, len(keys)):
        for query in range(heads):
            a = np.float32(0)
            for i in range(width):
                a += queries[query, i] * keys[column, i]
            scores[query, column] = a


@compiled
def _add_values(weights: Any, values: Any, prefetch: Any, output: Any, heads: Any, width: Any) -> None:
    """Add values f32[n, width], weighted by f32[heads, n], to output f32[heads, width].

    Adds four columns at a time, since the output is read and written each time. `prefetch` is the address to load next.
    """
    fours = len(values) // 4 * 4
    for column in range(0, fours, 4):
        _fetch_columns(prefetch, column, column + 4, width)
        for query in range(heads):
            a, b = weights[query, column], weights[query, column + 1]
            c, d = weights[query, column + 2], weights[query, column + 3]
            for i in range(width):
                pair = a * values[column, i] + b * values[column + 1, i]
                output[query, i] += pair + c * values[column + 2, i] + d * values[column + 3, i]
    for column in range(fours, len(values)):
        for query in range(heads):
            for i in range(width):
                output[query, i] += weights[query, column] * values[column, i]


@compiled
def _attend_columns(  # noqa: PLR0913 - a kernel takes arrays, not objects
    queries: Any, keys: Any, values: Any, prefetch: Any, scale: Any, scores: Any, highest: Any, total: Any, output: Any,
    heads: Any, width: Any,
) -> None:  # fmt: skip
    """Add columns, tile by tile, to the running attention output f32[heads, width] of a token.

    This is online softmax: `highest` and `total` hold each head's largest score and sum of e^(scale (score - highest))
    so far, and the output is rescaled when the largest score grows. scores f32[heads, TILE] is scratch space.
    `prefetch` is the address of the keys that are read next.
    """
    for begin in range(0, len(keys), TILE):
        end = min(begin + TILE, len(keys))
        _score(queries, keys[begin:end], address_of(values[begin:end]), scores, heads, width)
        for query in range(heads):
            own = scores[query, : end - begin]
            before = highest[query]
            highest[query] = max(before, highest_of(own))
            top = np.float32(0) if highest[query] == -np.inf else highest[query]
            left = exp((before - top) * scale)
            total[query] = total[query] * left + _exponentiate(own, top, scale)
            for i in range(width):
                output[query, i] *= left
        _add_values(
            scores, values[begin:end], address_of(keys[end:]) if end < len(keys) else prefetch, output, heads, width
        )


@functools.cache
def attend(heads: int, width: int) -> Any:  # noqa: C901 - its loops are one kernel
    """Return the attention kernel for `heads` query heads per key head and heads of `width` elements.

    Loops with constant bounds are faster by a third. The closure must bind nothing else, or numba's cache would miss.
    """

    def kernel(args_address: Any) -> None:
        """Compute softmax attention of each token over its segments; work is split by token and key head.

        Tokens with the same first segment are computed together, tile by tile, while the tile is in the cache.
        """
        args = carray(args_address, 1)[0]
        layer, scale, tokens, chunk = args.layer, args.scale, args.tokens, args.chunk
        order, first = carray(integers(args.order), tokens), carray(integers(args.first), tokens + 1)
        segments = carray(integers(args.segments), (first[tokens], SEGMENT_FIELDS))
        out = carray(floats(args.out), (tokens, args.kv_heads * heads, width))
        queries, output = np.empty((chunk, heads, width), np.float32), np.empty((chunk, heads, width), np.float32)
        highest, total = np.empty((chunk, heads), np.float32), np.empty((chunk, heads), np.float32)
        scores = np.empty((heads, TILE), np.float32)
        while True:
            begin = take(args_address, chunk)
            if begin >= tokens * args.kv_heads:
                break
            last = min(begin + chunk, tokens * args.kv_heads)
            while begin < last:
                head, at = begin // tokens, begin % tokens
                shared, count = segments[first[order[at]]], 1
                while begin + count < last and at + count < tokens:
                    other = segments[first[order[at + count]]]
                    if other[0] != shared[0] or other[4] != shared[4]:
                        break
                    count += 1
                for i in range(count):
                    for query in range(heads):
                        where = args.query + order[at + i] * args.query_token + (head * heads + query) * args.query_head
                        queries[i, query] = carray(floats(where), width)
                output[:count], highest[:count], total[:count] = 0, -np.inf, 0
                # What is read after these tokens; at the end, keys that are cached already.
                after = _keys_at(shared, layer, head)
                if begin + count < last:
                    after = _keys_at(segments[first[order[(begin + count) % tokens]]], layer, (begin + count) // tokens)
                keys, values = _segment_arrays(shared, layer, head, width)
                own = first[order[at]] + 1
                prefetch = _keys_at(segments[own], layer, head) if own < first[order[at] + 1] else after
                for column in range(0, len(keys), TILE):
                    tile_keys, tile_values = keys[column : column + TILE], values[column : column + TILE]
                    tile_prefetch = address_of(keys[column + TILE :]) if column + TILE < len(keys) else prefetch
                    for i in range(count):
                        _attend_columns(
                            queries[i], tile_keys, tile_values, tile_prefetch, scale, scores, highest[i], total[i],
                            output[i], heads, width,
                        )  # fmt: skip
                for i in range(count):
                    token = order[at + i]
                    for place in range(first[token] + 1, first[token + 1]):
                        prefetch = _keys_at(segments[place + 1], layer, head) if place + 1 < first[token + 1] else after
                        keys, values = _segment_arrays(segments[place], layer, head, width)
                        _attend_columns(
                            queries[i], keys, values, prefetch, scale, scores, highest[i], total[i], output[i],
                            heads, width,
                        )  # fmt: skip
                    for query in range(heads):
                        share = np.float32(1) / total[i, query]
                        for number in range(width):
                            out[token, head * heads + query, number] = output[i, query, number] * share
                begin += count

    kernel.__qualname__ = f"attend_{heads}_{width}"  # a file of its own in numba's cache
    return kernel_of(AttendArgs)(kernel)


@kernel_of(WriteArgs)
def write(args_address: Any) -> None:
    """Write keys and values of new tokens to their cache columns; work is split by token."""
    args = carray(args_address, 1)[0]
    width = args.width
    first = carray(integers(args.first), args.tokens + 1)
    segments = carray(integers(args.segments), (first[args.tokens], SEGMENT_FIELDS))
    while True:
        token = take(args_address, 1)
        if token >= args.tokens:
            break
        last = segments[first[token + 1] - 1]
        for head in range(args.kv_heads):
            keys, values = _segment_arrays(last, args.layer, head, width)
            keys[-1] = carray(floats(args.keys + token * args.keys_token + head * args.keys_head), width)
            values[-1] = carray(floats(args.values + token * args.values_token + head * args.values_head), width)
