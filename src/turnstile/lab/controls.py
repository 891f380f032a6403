"""Control variates: sharper means of sampled gradients, by sums whose means are exactly known.

A control is a gradient with other weights than an estimator's (returns to go, returns less the others' mean, ...). Its
mean is known from the list of all paths, so the regression of an estimator's gradient on the controls, evaluated at
their known means, is its mean without the explained noise; an estimator that is itself a sum of controls (rloo) keeps
no noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from turnstile.lab.play import Drawn
from turnstile.lab.world import F64, Truth, sums

FOLDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Adjusted:
    """The adjusted mean of a sampled gradient."""

    mean: F64  # [D]
    covariance: F64  # [D, D] of that mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """C controls of N steps, less their known means.

    The coefficients that adjust a step are fitted on other steps (in `FOLDS` parts), so that the mean stays unbiased
    and the residual is an honest measure of its noise, even with few informative steps. One coefficient serves all
    logits: with one for each, a logit that few samples touch would be fitted to these alone.
    """

    values: F64  # [N, D, C]
    inverses: tuple[F64, ...]  # of each fold, [C, steps outside it * D]: the pseudo-inverse of the centred others

    def mean(self, gradients: F64) -> Adjusted:
        """Return the adjusted mean of gradients f64[N, D]."""
        n = len(gradients)
        adjusted = gradients.copy()
        for k, inverse in enumerate(self.inverses):
            others = np.arange(n) % FOLDS != k
            known = gradients[others]
            adjusted[~others] -= self.values[~others] @ (inverse @ (known - known.mean(axis=0)).ravel())
        mean = adjusted.mean(axis=0)
        residuals = adjusted - mean
        return Adjusted(mean=mean, covariance=residuals.T @ residuals / n / max(1, n - 1))


def controls(drawn: Drawn, true: Truth, *, independent: bool = True) -> Controls:
    """Return the controls of the steps of `drawn`; `true` is of the policy that sampled them.

    `independent`: no attempt is a branch of another.
    """
    columns = _single(drawn, true) + (_cross_controls(drawn, true) if independent else [])
    values = np.stack(columns, axis=-1)
    sizes = np.maximum(np.abs(values).max(axis=(0, 1)), 1e-12)  # columns of one scale
    inverses = []
    for k in range(FOLDS):
        others = values[np.arange(len(values)) % FOLDS != k]
        flat = (others - others.mean(axis=0)).reshape(-1, len(columns))
        inverses.append(np.linalg.pinv(flat / sizes, rcond=1e-9) / sizes[:, None])
    return Controls(values=values, inverses=tuple(inverses))


def _single(drawn: Drawn, true: Truth) -> list[F64]:
    """Return controls that sum a quantity of each attempt, f64[N, D], less their means."""
    world, pi = drawn.player.world, drawn.at
    value, to_go = world.turn_weights("value"), world.turn_weights("to_go")
    turns = np.arange(value.shape[1])
    squares = np.square(value - true.value)
    weights = [value, to_go, true.advantage, true.baseline, np.ones_like(value), squares]
    for t in turns:
        weights += [value * (turns == t), np.ones_like(value) * (turns == t)]
    result = []
    for each in weights:
        by_path = world.scores(pi, each)
        result.append(by_path[drawn.paths].mean(axis=(1, 2)) - _mean(drawn, true, by_path))
    return result


def _cross_controls(drawn: Drawn, true: Truth) -> list[F64]:
    """Return controls that multiply a quantity of an attempt by a quantity of the others of its group."""
    world, pi = drawn.player.world, drawn.at
    value = world.turn_weights("value")
    result: list[F64] = []
    for seat in world.seats:
        own = np.array([[step.seat == seat for step in path.steps] + [False] * (value.shape[1] - len(path.steps))
                        for path in world.paths])  # fmt: skip
        returns = np.array([path.value(seat) for path in world.paths])
        spread = np.square(returns - _by_task(drawn, true, returns))
        for of, other in ((own * 1.0, returns), (own * (value - true.value), spread)):
            by_path = world.scores(pi, of)
            others = _others(other[drawn.paths])
            means = _by_task(drawn, true, other)  # the two factors are independent, so their means multiply
            result.append(
                (others[..., None] * by_path[drawn.paths]).mean(axis=(1, 2))
                - _mean(drawn, true, by_path * means[:, None])
            )
    return result


def _others(values: F64) -> F64:
    """Return the mean over the other attempts of the group, along the last axis."""
    result: F64 = (values.sum(axis=-1, keepdims=True) - values) / (values.shape[-1] - 1)
    return result


def _mean(drawn: Drawn, true: Truth, by_path: F64) -> F64:
    """Return the exact mean of a quantity of a path, f64[P, D] -> f64[D], with equal weight for each task."""
    result: F64 = true.probabilities @ by_path / len(drawn.player.tasks)
    return result


def _by_task(drawn: Drawn, true: Truth, values: F64) -> F64:
    """Return the exact mean of `values` f64[P] over each path's task, f64[P]."""
    task = drawn.player.world.task
    return sums(task, true.probabilities * values, len(drawn.player.tasks))[task]
