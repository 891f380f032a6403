"""Kernels of sampling on a CPU, compiled by numba for the machine they run on.

What they compute, and on what, is in `models/compiled.py`, which alone calls them. Every member of a team of threads
runs one at the same time as the others; they take their work from a counter that they share.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import intrinsic

from turnstile.models.compiled import AttendWork, DrawWork, ShortenWork, WriteWork

# numba's cache on disk sees changes of this file and of the works' fields, and of nothing else: so what else kernels
# are made of stays here.

PART = 5
"""Numbers of a part of what is kept: the address of the keys of its first layer; how far from there are the values, the
next layer and the next head, in bytes; how many columns are seen."""

STRETCH = 256
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


LEAST = np.float32(-87)
"""Below this e^x is nothing."""


@_compiled
def _exp(x: Any) -> Any:
    """e^x for x <= 0, to 2e-7 of it: 2^n by its bits, and a polynomial for what is left."""
    inside = LEAST if x < LEAST else x
    n = np.floor(inside * np.float32(1.44269504) + np.float32(0.5))
    r = inside - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 720) + r * np.float32(1 / 5040)
    p = np.float32(1 / 24) + r * (np.float32(1 / 120) + r * p)
    p = np.float32(1 / 2) + r * (np.float32(1 / 6) + r * p)
    p = np.float32(1) + r * (np.float32(1) + r * p)
    p *= np.int32((np.int32(n) + 127) << 23).view(np.float32)
    return np.float32(0) if x < LEAST else p


@_compiled
def _kept(part: Any, layer: Any, head: Any, width: Any) -> Any:
    """Keys and values f32[columns, width] of a part i64[PART]."""
    keys = part[0] + layer * part[2] + head * part[3]
    shape = (part[4], width)
    return carray(_floats(keys), shape), carray(_floats(keys + part[1]), shape)


@njit(fastmath=True, error_model="numpy", cache=True)
def _highest(scores: Any) -> Any:
    """Of scores f32[n]. Of those that hold NaN it is any number, and they stay what they are."""
    highest = scores[0]
    for column in range(1, len(scores)):
        highest = max(highest, scores[column])
    return highest


@_compiled
def _soften(scores: Any, scale: Any) -> Any:
    """Scores f32[n] become e^(scale (score - the highest)); the sum of those."""
    highest, total = _highest(scores), np.float32(0)
    for column in range(len(scores)):
        scores[column] = _exp((scores[column] - highest) * scale)
        total += scores[column]
    return total


@functools.cache
def attend(heads: int, width: int) -> int:
    """The address of a kernel for so many heads of queries to one of keys, of that width: loops over numbers known
    beforehand are faster by a third."""

    @_compiled
    def score(asked: Any, keys: Any, scores: Any) -> None:
        """Products of asked f32[heads, width] and keys f32[n, width] -> scores f32[heads, n]."""
        fours = len(keys) // 4 * 4
        for column in range(0, fours, 4):
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
    def mix(shares: Any, values: Any, seen: Any) -> None:
        """Adds shares f32[heads, n] of values f32[n, width] to seen f32[heads, width]."""
        fours = len(values) // 4 * 4
        for column in range(0, fours, 4):
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

    @_kernel(AttendWork)
    def kernel(given: Any) -> None:
        """Softmax attention of each token over the parts that it sees; a task is a token and one head of keys."""
        work = carray(given, 1)[0]
        layer, scale, tokens, chunk = work.layer, work.scale, work.tokens, work.chunk
        tasks = tokens * work.kv_heads
        first = carray(_integers(work.first), tokens + 1)
        parts = carray(_integers(work.parts), (first[tokens], PART))
        out = carray(_floats(work.out), (tokens, work.kv_heads * heads, width))
        asked, scores = np.empty((heads, width), np.float32), np.empty((heads, work.most), np.float32)
        seen = np.empty((heads, width), np.float32)
        while True:
            begin = _take(given, chunk)
            if begin >= tasks:
                break
            for task in range(begin, min(begin + chunk, tasks)):
                head, token = task // tokens, task % tokens
                for query in range(heads):
                    at = work.query + token * work.query_token + (head * heads + query) * work.query_head
                    asked[query] = carray(_floats(at), width)
                seen[:] = 0
                end = 0
                for place in range(first[token], first[token + 1]):
                    keys, _ = _kept(parts[place], layer, head, width)
                    score(asked, keys, scores[:, end : end + len(keys)])
                    end += len(keys)
                for query in range(heads):
                    asked[query, 0] = _soften(scores[query, :end], scale)
                end = 0
                for place in range(first[token], first[token + 1]):
                    _, values = _kept(parts[place], layer, head, width)
                    mix(scores[:, end : end + len(values)], values, seen)
                    end += len(values)
                for query in range(heads):
                    share = np.float32(1) / asked[query, 0]
                    for i in range(width):
                        out[token, head * heads + query, i] = seen[query, i] * share

    address: int = kernel.address
    return address


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
    """Adds up e^(cooling (logit - best)) in stretches of the vocabulary -> masses f64[n]; what they come to, and what
    they come to when each counts as much as its logarithm."""
    total, leaning = np.float64(0), np.float64(0)
    for stretch in range(len(masses)):
        begin = stretch * STRETCH
        mass, lean = np.float32(0), np.float32(0)
        for token in range(begin, min(begin + STRETCH, len(logits))):
            x = (logits[token] - best) * cooling
            p = _exp(x)
            mass += p
            lean += p * (LEAST if x < LEAST else x)
        masses[stretch] = mass
        total += mass
        leaning += lean
    return total, leaning


@_compiled
def _find(logits: Any, best: Any, cooling: Any, masses: Any, target: Any) -> Any:
    """The token at which the mass goes beyond a target; the last that has any, where rounding keeps it from that."""
    last, before, stretch = 0, np.float64(0), 0
    while stretch < len(masses) - 1 and before + masses[stretch] <= target:
        before += masses[stretch]
        stretch += 1
    for token in range(stretch * STRETCH, min((stretch + 1) * STRETCH, len(logits))):
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
    masses = np.empty((vocabulary + STRETCH - 1) // STRETCH, np.float64)
    while True:
        i = _take(given, 1)
        if i >= count:
            break
        logits = carray(_floats(work.logits + rows[i] * work.row), vocabulary)
        best = _highest(logits)
        total, leaning = _masses(logits, best, cooling, masses)
        tokens[i] = _find(logits, best, cooling, masses, draws[i] * total)
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
    rows, out, floor = carray(_floats(work.given), shape), carray(_floats(work.out), shape), _floats(work.floor)[0]
    while True:
        begin = _take(given, 4)
        if begin >= count:
            break
        for row in range(begin, min(begin + 4, count)):
            _shorten(rows[row], floor, out[row])
