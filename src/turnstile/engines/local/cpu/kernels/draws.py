"""Drawing tokens from logits."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from turnstile.engines.local.cpu.kernel_args import DrawArgs
from turnstile.engines.local.cpu.kernels.base import (
    LEAST,
    compiled,
    doubles,
    exp,
    floats,
    highest_of,
    integers,
    kernel_of,
    take,
)

DRAW_STRETCH = 256
"""Tokens whose probabilities are added up first, to find where in the vocabulary a draw falls."""


@compiled
def _masses(logits: Any, best: Any, cooling: Any, masses: Any) -> Any:
    """Adds up e^(cooling (logit - best)) in stretches of the vocabulary -> masses f64[n]; what they come to, what they
    come to when each counts as much as its logarithm, and the last stretch that has any."""
    total, leaning, last = np.float64(0), np.float64(0), 0
    for stretch in range(len(masses)):
        begin = stretch * DRAW_STRETCH
        mass, lean = np.float32(0), np.float32(0)
        for token in range(begin, min(begin + DRAW_STRETCH, len(logits))):
            x = (logits[token] - best) * cooling
            p = exp(x)
            mass += p
            lean += p * (LEAST if x < LEAST else x)
        masses[stretch] = mass
        total += mass
        leaning += lean
        last = stretch if mass > 0 else last
    return total, leaning, last


@compiled
def _find(logits: Any, best: Any, cooling: Any, masses: Any, end: Any, target: Any) -> Any:
    """The token at which the mass goes beyond a target; the last that has any, where rounding keeps it from that. The
    last stretch that has any is `end`."""
    last, before, stretch = 0, np.float64(0), 0
    while stretch < end and before + masses[stretch] <= target:
        before += masses[stretch]
        stretch += 1
    for token in range(stretch * DRAW_STRETCH, min((stretch + 1) * DRAW_STRETCH, len(logits))):
        p = exp((logits[token] - best) * cooling)
        before += p
        last = token if p > 0 else last
        if before > target and p > 0:
            break
    return last


@kernel_of(DrawArgs)
def draw(given: Any) -> None:
    """Tokens drawn from softmaxes by inversion, with their log-probabilities, and the entropies; a task is a draw."""
    work = carray(given, 1)[0]
    count, vocabulary, cooling = work.count, work.vocabulary, work.cooling
    rows, draws = carray(integers(work.rows), count), carray(doubles(work.draws), count)
    tokens, found = carray(integers(work.tokens), count), carray(doubles(work.found), (count, 2))
    masses = np.empty((vocabulary + DRAW_STRETCH - 1) // DRAW_STRETCH, np.float64)
    while True:
        i = take(given, 1)
        if i >= count:
            break
        logits = carray(floats(work.logits + rows[i] * work.row), vocabulary)
        best = highest_of(logits)
        total, leaning, end = _masses(logits, best, cooling, masses)
        tokens[i] = _find(logits, best, cooling, masses, end, draws[i] * total)
        norm = np.log(total)
        found[i, 0] = min(np.float64((logits[tokens[i]] - best) * cooling) - norm, 0.0)
        found[i, 1] = max(norm - leaning / total, 0.0) if np.isfinite(total) else np.nan
