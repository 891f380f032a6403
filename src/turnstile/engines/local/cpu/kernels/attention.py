"""Attention of single tokens over what is kept of those before them."""

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

PART = 5
"""Numbers of a part of what is kept: the address of the keys of its first layer; how far from there are the values, the
next layer and the next head, in bytes; how many columns are seen."""

TILE = 128
"""Columns whose keys and values are in the nearest cache at once."""


@compiled
def _keys(part: Any, layer: Any, head: Any) -> Any:
    """The address of the keys of a part i64[PART]."""
    return part[0] + layer * part[2] + head * part[3]


@compiled
def _kept(part: Any, layer: Any, head: Any, width: Any) -> Any:
    """Keys and values f32[columns, width] of a part i64[PART]."""
    keys = _keys(part, layer, head)
    shape = (part[4], width)
    return carray(floats(keys), shape), carray(floats(keys + part[1]), shape)


@compiled
def _fetch_columns(address: Any, begin: Any, end: Any, width: Any) -> None:
    """Asks for columns of keys or values f32[columns, width] at an address. Those that are read next come from memory
    while others are computed with: a processor foresees what it reads no further than to the end of a page."""
    size = width * 4  # bytes of a column
    for line in range(address + begin * size, address + end * size, LINE):
        fetch(line)


@compiled
def _soften(scores: Any, highest: Any, scale: Any) -> Any:
    """Scores f32[n] become e^(scale (score - the highest)); the sum of those."""
    total = np.float32(0)
    for column in range(len(scores)):
        scores[column] = exp((scores[column] - highest) * scale)
        total += scores[column]
    return total


# `heads` and `width` are numbers that each kernel is made for (see `attend`).


@compiled
def _score(asked: Any, keys: Any, then: Any, scores: Any, heads: Any, width: Any) -> None:
    """Products of asked f32[heads, width] and keys f32[n, width] -> scores f32[heads, n]; four at a time, as sums that
    do not wait for each other. At `then` lies what is read next."""
    fours = len(keys) // 4 * 4
    for column in range(0, fours, 4):
        _fetch_columns(then, column, column + 4, width)
        for query in range(heads):
            a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(width):
                a += asked[query, i] * keys[column, i]
                b += asked[query, i] * keys[column + 1, i]
                c += asked[query, i] * keys[column + 2, i]
                d += asked[query, i] * keys[column + 3, i]
            scores[query, column], scores[query, column + 1] = a, b
            scores[query, column + 2], scores[query, column + 3] = c, d
    for column in range(fours, len(keys)):
        for query in range(heads):
            a = np.float32(0)
            for i in range(width):
                a += asked[query, i] * keys[column, i]
            scores[query, column] = a


@compiled
def _mix(shares: Any, values: Any, then: Any, seen: Any, heads: Any, width: Any) -> None:
    """Adds shares f32[heads, n] of values f32[n, width] to seen f32[heads, width]; four at a time, as `seen` is read
    and written for each. At `then` lies what is read next."""
    fours = len(values) // 4 * 4
    for column in range(0, fours, 4):
        _fetch_columns(then, column, column + 4, width)
        for query in range(heads):
            a, b = shares[query, column], shares[query, column + 1]
            c, d = shares[query, column + 2], shares[query, column + 3]
            for i in range(width):
                some = a * values[column, i] + b * values[column + 1, i]
                seen[query, i] += some + c * values[column + 2, i] + d * values[column + 3, i]
    for column in range(fours, len(values)):
        for query in range(heads):
            for i in range(width):
                seen[query, i] += shares[query, column] * values[column, i]


@compiled
def _absorb(  # noqa: PLR0913 - a kernel takes arrays, not objects
    asked: Any, keys: Any, values: Any, then: Any, scale: Any, scores: Any, highest: Any, total: Any, seen: Any,
    heads: Any, width: Any,
) -> None:  # fmt: skip
    """Adds columns, tile by tile, to what a token's heads have seen f32[heads, width] so far, whose masses are `total`,
    each e^(scale (score - highest)); scores f32[heads, TILE] are for use here. At `then` lie the keys that are read
    next."""
    for begin in range(0, len(keys), TILE):
        end = min(begin + TILE, len(keys))
        _score(asked, keys[begin:end], address_of(values[begin:end]), scores, heads, width)
        for query in range(heads):
            own = scores[query, : end - begin]
            before = highest[query]
            highest[query] = max(before, highest_of(own))
            top = np.float32(0) if highest[query] == -np.inf else highest[query]
            left = exp((before - top) * scale)
            total[query] = total[query] * left + _soften(own, top, scale)
            for i in range(width):
                seen[query, i] *= left
        _mix(scores, values[begin:end], address_of(keys[end:]) if end < len(keys) else then, seen, heads, width)


@functools.cache
def attend(heads: int, width: int) -> Any:  # noqa: C901 - its loops are one kernel
    """The kernel for so many heads of queries to one of keys, of that width: loops over numbers known beforehand are
    faster by a third. Nothing else may be bound in it: numba would not find it in its cache."""

    def kernel(given: Any) -> None:
        """Softmax attention of each token over the parts that it sees; a task is a token and one head of keys.

        Tokens that see the same part first take each of its tiles one after the other, while it is in the cache.
        """
        work = carray(given, 1)[0]
        layer, scale, tokens, chunk = work.layer, work.scale, work.tokens, work.chunk
        order, first = carray(integers(work.order), tokens), carray(integers(work.first), tokens + 1)
        parts = carray(integers(work.parts), (first[tokens], PART))
        out = carray(floats(work.out), (tokens, work.kv_heads * heads, width))
        asked, seen = np.empty((chunk, heads, width), np.float32), np.empty((chunk, heads, width), np.float32)
        highest, total = np.empty((chunk, heads), np.float32), np.empty((chunk, heads), np.float32)
        scores = np.empty((heads, TILE), np.float32)
        while True:
            begin = take(given, chunk)
            if begin >= tokens * work.kv_heads:
                break
            last = min(begin + chunk, tokens * work.kv_heads)
            while begin < last:
                head, at = begin // tokens, begin % tokens
                shared, count = parts[first[order[at]]], 1
                while begin + count < last and at + count < tokens:
                    other = parts[first[order[at + count]]]
                    if other[0] != shared[0] or other[4] != shared[4]:
                        break
                    count += 1
                for i in range(count):
                    for query in range(heads):
                        where = work.query + order[at + i] * work.query_token + (head * heads + query) * work.query_head
                        asked[i, query] = carray(floats(where), width)
                seen[:count], highest[:count], total[:count] = 0, -np.inf, 0
                after = _keys(shared, layer, head)  # is read after this group; where nothing is, what is there already
                if begin + count < last:
                    after = _keys(parts[first[order[(begin + count) % tokens]]], layer, (begin + count) // tokens)
                keys, values = _kept(shared, layer, head, width)
                own = first[order[at]] + 1
                then = _keys(parts[own], layer, head) if own < first[order[at] + 1] else after
                for column in range(0, len(keys), TILE):
                    some, theirs = keys[column : column + TILE], values[column : column + TILE]
                    near = address_of(keys[column + TILE :]) if column + TILE < len(keys) else then
                    for i in range(count):
                        _absorb(
                            asked[i], some, theirs, near, scale, scores, highest[i], total[i], seen[i], heads, width
                        )
                for i in range(count):
                    token = order[at + i]
                    for place in range(first[token] + 1, first[token + 1]):
                        then = _keys(parts[place + 1], layer, head) if place + 1 < first[token + 1] else after
                        keys, values = _kept(parts[place], layer, head, width)
                        _absorb(
                            asked[i], keys, values, then, scale, scores, highest[i], total[i], seen[i], heads, width
                        )
                    for query in range(heads):
                        share = np.float32(1) / total[i, query]
                        for number in range(width):
                            out[token, head * heads + query, number] = seen[i, query, number] * share
                begin += count

    kernel.__qualname__ = f"attend_{heads}_{width}"  # one file of numba's cache for each
    return kernel_of(AttendArgs)(kernel)


@kernel_of(WriteArgs)
def write(given: Any) -> None:
    """Keys and values of new tokens, to their places; a task is a token."""
    work = carray(given, 1)[0]
    width = work.width
    first = carray(integers(work.first), work.tokens + 1)
    parts = carray(integers(work.parts), (first[work.tokens], PART))
    while True:
        token = take(given, 1)
        if token >= work.tokens:
            break
        last = parts[first[token + 1] - 1]
        for head in range(work.kv_heads):
            keys, values = _kept(last, work.layer, head, width)
            keys[-1] = carray(floats(work.keys + token * work.keys_token + head * work.keys_head), width)
            values[-1] = carray(floats(work.values + token * work.values_token + head * work.values_head), width)
