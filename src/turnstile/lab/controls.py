"""Control variates, which reduce the noise of mean gradients by means of quantities whose means are known exactly.

A control is a policy gradient with weights other than the estimator's (returns to go, returns minus the others' mean,
...). Its mean is known from the enumerated paths. An estimator's gradient is regressed on the controls, and the
regression is evaluated at their known means, which removes the noise that they explain. An estimator that is itself a
linear combination of controls (rloo) keeps no noise.
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
    covariance: F64  # [D, D] of the mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """C controls of N steps, minus their known means.

    The coefficients that adjust a step are fitted on other steps (in `FOLDS` folds), so that the mean stays unbiased
    and the residuals measure its noise fairly even if few steps are informative. All logits share one coefficient per
    control, because a separate one for a logit that few samples touch would overfit to them.
    """

    values: F64  # [N, D, C]
    inverses: tuple[F64, ...]  # by fold, [C, steps outside it * D]: the pseudo-inverse of those steps' centred controls

    def mean(self, gradients: F64) -> Adjusted:
        """Return the adjusted mean of the gradients f64[N, D]."""
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
    """Return the controls for the steps of `drawn`; `true` belongs to the policy that sampled them.

    With `independent`, no attempt branches from another, so controls across attempts can be used too.
    """
    columns = _attempt_controls(drawn, true) + (_cross_controls(drawn, true) if independent else [])
    values = np.stack(columns, axis=-1)
    sizes = np.maximum(np.abs(values).max(axis=(0, 1)), 1e-12)  # scales the columns alike
    inverses = []
    for k in range(FOLDS):
        others = values[np.arange(len(values)) % FOLDS != k]
        flat = (others - others.mean(axis=0)).reshape(-1, len(columns))
        inverses.append(np.linalg.pinv(flat / sizes, rcond=1e-9) / sizes[:, None])
    return Controls(values=values, inverses=tuple(inverses))


def _attempt_controls(drawn: Drawn, true: Truth) -> list[F64]:
    """Return controls that sum a quantity of each attempt, each f64[N, D], minus their means."""
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
        result.append(by_path[drawn.paths].mean(axis=(1, 2)) - _exact_mean(drawn, true, by_path))
    return result


def _cross_controls(drawn: Drawn, true: Truth) -> list[F64]:
    """Return controls that multiply a quantity of each attempt by the mean of another over the rest of its group.

    Each is f64[N, D], minus its mean.
    """
    world, pi = drawn.player.world, drawn.at
    value = world.turn_weights("value")
    result: list[F64] = []
    for seat in world.seats:
        own = np.array([[step.seat == seat for step in path.steps] + [False] * (value.shape[1] - len(path.steps))
                        for path in world.paths])  # fmt: skip
        returns = np.array([path.value(seat) for path in world.paths])
        spread = np.square(returns - _task_means(drawn, true, returns))
        for of, other in ((own * 1.0, returns), (own * (value - true.value), spread)):
            by_path = world.scores(pi, of)
            others = _leave_one_out_mean(other[drawn.paths])
            means = _task_means(drawn, true, other)  # the two factors are independent, so their means multiply
            result.append(
                (others[..., None] * by_path[drawn.paths]).mean(axis=(1, 2))
                - _exact_mean(drawn, true, by_path * means[:, None])
            )
    return result


def _leave_one_out_mean(values: F64) -> F64:
    """Return, for each attempt, the mean of `values` over the other attempts of its group, along the last axis."""
    result: F64 = (values.sum(axis=-1, keepdims=True) - values) / (values.shape[-1] - 1)
    return result


def _exact_mean(drawn: Drawn, true: Truth, by_path: F64) -> F64:
    """Return the exact mean of a quantity of paths, f64[P, D] -> f64[D]; tasks have equal weight."""
    result: F64 = true.probabilities @ by_path / len(drawn.player.tasks)
    return result


def _task_means(drawn: Drawn, true: Truth, values: F64) -> F64:
    """Return, for each path, the exact mean of `values` f64[P] over its task, f64[P]."""
    task = drawn.player.world.task
    return sums(task, true.probabilities * values, len(drawn.player.tasks))[task]
