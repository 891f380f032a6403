"""Draw tokens from logits."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from turnstile.engines.local.cpu.kernel_args import DrawArgs
from turnstile.engines.local.cpu.kernels.base import (
    EXP_UNDERFLOW,
    compiled,
    doubles,
    exp,
    floats,
    highest_of,
    integers,
    kernel_of,
    take,
)

SEGMENT = 256
"""Tokens in a segment of the vocabulary. Segments are summed first, to find the one in which a draw falls."""


@compiled
def _sum_segments(logits: Any, best: Any, inverse_temperature: Any, masses: Any) -> Any:
    """Write the sums of e^(inverse_temperature (logit - best)) over each segment of the vocabulary to masses f64[n].

    Returns the total, the total with each term weighted by its logarithm, and the last segment with any mass.
    """
    total, weighted_total, last = np.float64(0), np.float64(0), 0
    for segment in range(len(masses)):
        begin = segment * SEGMENT
        mass, weighted = np.float32(0), np.float32(0)
        for token in range(begin, min(begin + SEGMENT, len(logits))):
            x = (logits[token] - best) * inverse_temperature
            p = exp(x)
            mass += p
            weighted += p * (EXP_UNDERFLOW if x < EXP_UNDERFLOW else x)
        masses[segment] = mass
        total += mass
        weighted_total += weighted
        last = segment if mass > 0 else last
    return total, weighted_total, last


@compiled
def _find_token(logits: Any, best: Any, inverse_temperature: Any, masses: Any, end: Any, target: Any) -> Any:
    """Return the token at which the cumulative mass exceeds a target, or the last token with any mass.

    Rounding can keep the mass below the target. `end` is the last segment with any mass.
    """
    last, before, segment = 0, np.float64(0), 0
    while segment < end and before + masses[segment] <= target:
        before += masses[segment]
        segment += 1
    for token in range(segment * SEGMENT, min((segment + 1) * SEGMENT, len(logits))):
        p = exp((logits[token] - best) * inverse_temperature)
        before += p
        last = token if p > 0 else last
        if before > target and p > 0:
            break
    return last


@kernel_of(DrawArgs)
def draw(args_address: Any) -> None:
    """Draw tokens from softmaxes by inversion, with log-probabilities and entropies; work is split by draw."""
    args = carray(args_address, 1)[0]
    count, vocabulary, inverse_temperature = args.count, args.vocabulary, args.inverse_temperature
    rows, draws = carray(integers(args.rows), count), carray(doubles(args.draws), count)
    tokens, stats = carray(integers(args.tokens), count), carray(doubles(args.stats), (count, 2))
    masses = np.empty((vocabulary + SEGMENT - 1) // SEGMENT, np.float64)
    while True:
        i = take(args_address, 1)
        if i >= count:
            break
        logits = carray(floats(args.logits + rows[i] * args.row), vocabulary)
        best = highest_of(logits)
        total, weighted_total, end = _sum_segments(logits, best, inverse_temperature, masses)
        tokens[i] = _find_token(logits, best, inverse_temperature, masses, end, draws[i] * total)
        norm = np.log(total)
        stats[i, 0] = min(np.float64((logits[tokens[i]] - best) * inverse_temperature) - norm, 0.0)
        stats[i, 1] = max(norm - weighted_total / total, 0.0) if np.isfinite(total) else np.nan
