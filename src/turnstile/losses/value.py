"""The loss of a critic's values."""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import NO_REWARD, Metrics, extra, needs


@declare(at(NO_REWARD), at(NO_REWARD, clip=0.05))
@needs("values", "returns")
def value(values: Tensor, batch: Batch, *, clip: float | None = 0.2) -> tuple[Tensor, Metrics]:
    """Return the clipped squared error of a critic, as in PPO's code.

    At each token it is max((v - R)^2, (v_old + clip(v - v_old, -clip, clip) - R)^2) / 2; GAE (arXiv 1506.02438) uses it
    unclipped (`clip = None`). It is not a loss of the policy: a recipe's critic uses it, with the clip of
    `[credit.critic]`. It takes the critic's values f32[N] instead of log-probabilities. `batch.extras["values"]` are
    the values before the step and `batch.extras["returns"]` their targets, both f32[N].

    values f32[N] -> loss f32[N]; metrics value, value_error ((v - R)^2), clipped (1 where the gradient is cut). Raises
    ConfigError without old values and returns, and for a clip that is not above 0.
    """
    if clip is not None and clip <= 0:
        raise ConfigError(f"loss 'value': clip must be above 0, got {clip}")
    old, returns = extra(batch, "values", "value"), extra(batch, "returns", "value")
    error = (values - returns).square()
    worst = clipped_error(values, old, returns, clip)
    metrics = {
        "value": values.detach(),
        "value_error": error.detach(),
        "clipped": (worst > error).to(values.dtype),
    }
    return worst / 2, metrics


def clipped_error(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return (v - R)^2, f32[N].

    With a clip, it is at least the squared error of the value that moved by at most `clip` from the old one.
    """
    error = (values - returns).square()
    if clip is None:
        return error
    return torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
