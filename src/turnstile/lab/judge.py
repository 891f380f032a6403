"""Comparison of a mean gradient, given its uncertainty, with the exact gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from turnstile.lab.controls import Adjusted
from turnstile.lab.world import F64, Truth

EPISODES = 64
"""The number of episodes in the step that `aligned` refers to."""
EXACT = 1e-5
"""A bias below this share of the gradient is attributed to rounding of the advantages to float32."""
SIGNIFICANT = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """An estimator's mean gradient m compared with the exact gradient d of the return. Lengths are relative to d's.

    Estimators that normalise change the gradient's length, for which the learning rate compensates, so `cosine` and
    `bias_scaled` do not depend on the length of m. The cosine is NaN if m cannot be distinguished from zero.
    """

    exact: bool  # all outcomes were enumerated
    length: float  # of m along d; 1 is exact
    length_se: float
    cosine: float  # between m and d
    cosine_low: float  # 95 % interval
    cosine_high: float
    bias: float  # |m - d|
    bias_scaled: float  # the smallest |c m - d| over scalars c
    z: float  # significance of m differing from d, in standard deviations
    z_direction: float  # significance of its direction differing from d's
    episodes: float  # the number of episodes whose mean gradient has noise as large as m
    aligned: float  # progress of one step of 64 episodes, like a cosine: m.d / sqrt(m.m + noise), |d| = 1
    cosine_outcome: float  # between m and the gradient of the outcome alone

    @property
    def biased(self) -> bool:
        """Whether the direction differs significantly from the exact one."""
        return self.z_direction > SIGNIFICANT and not self.bias_scaled < EXACT


def judge(found: Adjusted, noise: float, true: Truth, *, exact: bool) -> Figures:
    """Return the figures of a mean gradient. `noise` is the trace of the gradient's covariance for one episode."""
    size = float(np.linalg.norm(true.gradient))
    unit, mean, covariance = true.gradient / size, found.mean / size, found.covariance / size**2
    length = float(mean @ unit)
    length_se = math.sqrt(max(0.0, float(unit @ covariance @ unit)))
    across = mean - length * unit
    project = np.eye(len(unit)) - np.outer(unit, unit)
    across_cov = project @ covariance @ project
    squared = float(across @ across) - float(np.trace(across_cov))  # without the length that noise alone adds
    spread = math.sqrt(4 * float(across @ across_cov @ across) + 2 * float(np.square(across_cov).sum()))
    low, mid, high = (math.sqrt(max(0.0, squared + sign * 1.96 * spread)) for sign in (-1, 0, 1))
    total = math.hypot(length, mid)
    silent = total < EXACT or surely(mean, covariance) < 1.0
    cosine = math.nan if silent else length / total
    bounds = sorted(length / max(math.hypot(length, end), EXACT) for end in (low, high))
    difference = mean - unit
    outcome = float(np.linalg.norm(true.outcome_gradient))
    return Figures(
        exact=exact,
        length=length,
        length_se=length_se,
        cosine=cosine,
        cosine_low=math.nan if silent else bounds[0],
        cosine_high=math.nan if silent else bounds[1],
        bias=math.sqrt(max(0.0, float(difference @ difference) - float(np.trace(covariance)))),
        bias_scaled=1.0 if silent else math.sqrt(max(0.0, 1 - cosine**2)),
        z=surely(difference, covariance),
        z_direction=surely(across, across_cov),
        episodes=math.inf if silent else noise / size**2 / total**2,
        aligned=0.0 if silent else length / math.sqrt(total**2 + noise / size**2 / EPISODES),
        cosine_outcome=math.nan
        if silent or outcome == 0
        else float(found.mean @ true.outcome_gradient) / outcome / float(np.linalg.norm(found.mean)),
    )


def surely(difference: F64, covariance: F64) -> float:
    """Return how many standard deviations the length of `difference` lies above what its noise explains.

    The noise has this `covariance`. Its squared length is approximately a scaled chi-squared variable with the
    covariance's effective degrees of freedom (Satterthwaite), whose cube root is approximately normal (Wilson and
    Hilferty).
    """
    squared, expected = float(difference @ difference), float(np.trace(covariance))
    if expected <= EXACT**2:
        return math.inf if squared > EXACT**2 else 0.0
    degrees = expected**2 / float(np.square(covariance).sum())
    spread = 2 / (9 * degrees)
    return float((squared / expected) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
