"""Kernels of sampling on a CPU, compiled by numba for the machine they run on.

What they compute, and on what, is in `models/compiled.py`, which alone calls them. Every member of a team of threads
runs one at the same time as the others; they take their tasks from a counter that they share.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import intrinsic

from turnstile.models.works import AttendWork, DrawWork, ShortenWork, WriteWork

PART = 5
"""Numbers of a part of what is kept: the address of the keys of its first layer; how far from there are the values, the
next layer and the next head, in bytes; how many columns are seen."""

ROWS = 4
"""Rows that are shortened at once: each takes less time than the counter."""

TILE = 128
"""Columns whose keys and values are in the nearest cache at once."""

LINE = 64
"""Bytes that come from memory together."""

DRAW_STRETCH = 256
"""Tokens whose probabilities are added up first, to find where in the vocabulary a draw falls."""

# NaN and infinity are what they are: a policy that has lost its numbers must not sample as if it had not.
EXACT = {"reassoc", "contract", "arcp", "nsz"}
_compiled = njit(fastmath=EXACT, error_model="numpy", cache=True)


def _kernel(work: type) -> Any:
    """Compiles a function of one work, given by address."""
    signature = types.void(types.CPointer(from_dtype(np.dtype(work))))
    return cfunc(signature, fastmath=EXACT, error_model="numpy", cache=True)


def _numbers(kind: Any) -> Any:
    """What finds the numbers of a kind that begin at an address."""

    @intrinsic
    def found(context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), code

    return found


_floats, _doubles, _integers = _numbers(types.float32), _numbers(types.float64), _numbers(types.int64)


@intrinsic
def _take(context: Any, work: Any, count: Any) -> Any:
    """Adds to the first number of a work, which counts what is taken; what it was before. No two threads get the
    same."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, arguments[1], "monotonic")

    return types.int64(work, types.int64), code


@intrinsic
def _fetch(context: Any, address: Any) -> Any:
    """Asks for the memory at an address, and does not wait for it. There need be none."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        read, second_cache, data = ir.Constant(number, 0), ir.Constant(number, 2), ir.Constant(number, 1)
        builder.call(prefetch, [builder.inttoptr(arguments[0], byte), read, second_cache, data])
        return context.get_dummy_value()

    return types.void(types.int64), code


LEAST = np.float32(-87)
"""Below this e^x is nothing."""


@_compiled
def _exp(x: Any) -> Any:
    """e^x for x <= 0, to 2e-7 of it: 2^n by its bits, and a polynomial for what is left."""
    inside = x if x >= LEAST else LEAST  # NaN does not get as far as an integer
    n = np.floor(inside * np.float32(1.44269504) + np.float32(0.5))
    r = inside - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 720) + r * np.float32(1 / 5040)
    p = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * p)
    p = np.float32(1 / 2) + r * (np.float32(1 / 6) + r * p)
    p = np.float32(1) + r * (np.float32(1) + r * p)
    p *= np.int32((np.int32(n) + 127) << 23).view(np.float32)
    below = np.float32(0) if x < LEAST else x
    return p if x >= LEAST else below


@_compiled
def _keys(part: Any, layer: Any, head: Any) -> Any:
    """The address of the keys of a part i64[PART]."""
    return part[0] + layer * part[2] + head * part[3]


@_compiled
def _kept(part: Any, layer: Any, head: Any, width: Any) -> Any:
    """Keys and values f32[columns, width] of a part i64[PART]."""
    keys = _keys(part, layer, head)
    shape = (part[4], width)
    return carray(_floats(keys), shape), carray(_floats(keys + part[1]), shape)


@_compiled
def _fetch_columns(address: Any, begin: Any, end: Any, width: Any) -> None:
    """Asks for columns of keys or values f32[columns, width] at an address. Those that are read next come from memory
    while others are computed with: a processor foresees what it reads no further than to the end of a page."""
    size = width * 4  # bytes of a column
    for line in range(address + begin * size, address + end * size, LINE):
        _fetch(line)


@njit(fastmath={*EXACT, "nnan"}, error_model="numpy", cache=True)  # else it goes one by one
def _highest(scores: Any) -> Any:
    """Of scores f32[n]. Of those that hold NaN it is any number, and they stay what they are."""
    highest = scores[0]
    for column in range(1, len(scores)):
        highest = max(highest, scores[column])
    return highest


@_compiled
def _soften(scores: Any, highest: Any, scale: Any) -> Any:
    """Scores f32[n] become e^(scale (score - the highest)); the sum of those."""
    total = np.float32(0)
    for column in range(len(scores)):
        scores[column] = _exp((scores[column] - highest) * scale)
        total += scores[column]
    return total


# `heads` and `width` are numbers that each kernel is made for (see `attend`).


@_compiled
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


@_compiled
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


@_compiled
def _absorb(
    asked: Any, keys: Any, values: Any, then: Any, scale: Any, scores: Any, highest: Any, total: Any, seen: Any,
    heads: Any, width: Any,
) -> None:  # fmt: skip
    """Adds columns, tile by tile, to what a token's heads have seen f32[heads, width] so far, whose masses are `total`,
    each e^(scale (score - highest)); scores f32[heads, TILE] are for use here. At `then` lie the keys that are read
    next."""
    for begin in range(0, len(keys), TILE):
        end = min(begin + TILE, len(keys))
        _score(asked, keys[begin:end], values[begin:end].ctypes.data, scores, heads, width)
        for query in range(heads):
            own = scores[query, : end - begin]
            before = highest[query]
            highest[query] = max(before, _highest(own))
            top = np.float32(0) if highest[query] == -np.inf else highest[query]
            left = _exp((before - top) * scale)
            total[query] = total[query] * left + _soften(own, top, scale)
            for i in range(width):
                seen[query, i] *= left
        _mix(scores, values[begin:end], keys[end:].ctypes.data if end < len(keys) else then, seen, heads, width)


@functools.cache
def attend(heads: int, width: int) -> Any:
    """The kernel for so many heads of queries to one of keys, of that width: loops over numbers known beforehand are
    faster by a third. Nothing else may be bound in it: numba would not find it in its cache."""

    def kernel(given: Any) -> None:
        """Softmax attention of each token over the parts that it sees; a task is a token and one head of keys.

        Tokens that see the same part first take each of its tiles one after the other, while it is in the cache.
        """
        work = carray(given, 1)[0]
        layer, scale, tokens, chunk = work.layer, work.scale, work.tokens, work.chunk
        order, first = carray(_integers(work.order), tokens), carray(_integers(work.first), tokens + 1)
        parts = carray(_integers(work.parts), (first[tokens], PART))
        out = carray(_floats(work.out), (tokens, work.kv_heads * heads, width))
        asked, seen = np.empty((chunk, heads, width), np.float32), np.empty((chunk, heads, width), np.float32)
        highest, total = np.empty((chunk, heads), np.float32), np.empty((chunk, heads), np.float32)
        scores = np.empty((heads, TILE), np.float32)
        while True:
            begin = _take(given, chunk)
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
                        asked[i, query] = carray(_floats(where), width)
                seen[:count], highest[:count], total[:count] = 0, -np.inf, 0
                after = _keys(shared, layer, head)  # is read after this group; where nothing is, what is there already
                if begin + count < last:
                    after = _keys(parts[first[order[(begin + count) % tokens]]], layer, (begin + count) // tokens)
                keys, values = _kept(shared, layer, head, width)
                own = first[order[at]] + 1
                then = _keys(parts[own], layer, head) if own < first[order[at] + 1] else after
                for column in range(0, len(keys), TILE):
                    some, theirs = keys[column : column + TILE], values[column : column + TILE]
                    near = keys[column + TILE :].ctypes.data if column + TILE < len(keys) else then
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
    return _kernel(AttendWork)(kernel)


@_kernel(WriteWork)
def write(given: Any) -> None:
    """Keys and values of new tokens, to their places; a task is a token."""
    work = carray(given, 1)[0]
    width = work.width
    first = carray(_integers(work.first), work.tokens + 1)
    parts = carray(_integers(work.parts), (first[work.tokens], PART))
    while True:
        token = _take(given, 1)
        if token >= work.tokens:
            break
        last = parts[first[token + 1] - 1]
        for head in range(work.kv_heads):
            keys, values = _kept(last, work.layer, head, width)
            keys[-1] = carray(_floats(work.keys + token * work.keys_token + head * work.keys_head), width)
            values[-1] = carray(_floats(work.values + token * work.values_token + head * work.values_head), width)


@_compiled
def _masses(logits: Any, best: Any, cooling: Any, masses: Any) -> Any:
    """Adds up e^(cooling (logit - best)) in stretches of the vocabulary -> masses f64[n]; what they come to, what they
    come to when each counts as much as its logarithm, and the last stretch that has any."""
    total, leaning, last = np.float64(0), np.float64(0), 0
    for stretch in range(len(masses)):
        begin = stretch * DRAW_STRETCH
        mass, lean = np.float32(0), np.float32(0)
        for token in range(begin, min(begin + DRAW_STRETCH, len(logits))):
            x = (logits[token] - best) * cooling
            p = _exp(x)
            mass += p
            lean += p * (LEAST if x < LEAST else x)
        masses[stretch] = mass
        total += mass
        leaning += lean
        last = stretch if mass > 0 else last
    return total, leaning, last


@_compiled
def _find(logits: Any, best: Any, cooling: Any, masses: Any, end: Any, target: Any) -> Any:
    """The token at which the mass goes beyond a target; the last that has any, where rounding keeps it from that. The
    last stretch that has any is `end`."""
    last, before, stretch = 0, np.float64(0), 0
    while stretch < end and before + masses[stretch] <= target:
        before += masses[stretch]
        stretch += 1
    for token in range(stretch * DRAW_STRETCH, min((stretch + 1) * DRAW_STRETCH, len(logits))):
        p = _exp((logits[token] - best) * cooling)
        before += p
        last = token if p > 0 else last
        if before > target and p > 0:
            break
    return last


@_kernel(DrawWork)
def draw(given: Any) -> None:
    """Tokens drawn from softmaxes by inversion, with their log-probabilities, and the entropies; a task is a draw."""
    work = carray(given, 1)[0]
    count, vocabulary, cooling = work.count, work.vocabulary, work.cooling
    rows, draws = carray(_integers(work.rows), count), carray(_doubles(work.draws), count)
    tokens, found = carray(_integers(work.tokens), count), carray(_doubles(work.found), (count, 2))
    masses = np.empty((vocabulary + DRAW_STRETCH - 1) // DRAW_STRETCH, np.float64)
    while True:
        i = _take(given, 1)
        if i >= count:
            break
        logits = carray(_floats(work.logits + rows[i] * work.row), vocabulary)
        best = _highest(logits)
        total, leaning, end = _masses(logits, best, cooling, masses)
        tokens[i] = _find(logits, best, cooling, masses, end, draws[i] * total)
        norm = np.log(total)
        found[i, 0] = min(np.float64((logits[tokens[i]] - best) * cooling) - norm, 0.0)
        found[i, 1] = max(norm - leaning / total, 0.0) if np.isfinite(total) else np.nan


@_compiled
def _shorten(given: Any, floor: Any, out: Any) -> None:
    squares = floor * floor
    for i in range(len(given)):
        squares += given[i] * given[i]
    share = np.float32(1) / np.sqrt(squares)
    for i in range(len(given)):
        out[i] = given[i] * share


@_kernel(ShortenWork)
def shorten(given: Any) -> None:
    """Rows, each divided by its length, or a little more where that is hardly above a floor; a task is a row."""
    work = carray(given, 1)[0]
    count, shape = work.rows, (work.rows, work.width)
    rows, out, floor = carray(_floats(work.given), shape), carray(_floats(work.out), shape), work.floor
    while True:
        begin = _take(given, ROWS)
        if begin >= count:
            break
        for row in range(begin, min(begin + ROWS, count)):
            _shorten(rows[row], floor, out[row])
