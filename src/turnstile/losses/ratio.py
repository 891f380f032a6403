"""The ratio of the policy to the sampling policy, kept finite, and its metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError
from turnstile.losses.base import Metrics

LIMIT = 20.0
"""Log-ratios are clamped to +-20, so that the gradient of a token of weight 0 is 0 rather than 0 * inf."""


def log_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return log pi(token) - log behaviour(token), f32[N], clamped to [-LIMIT, LIMIT]."""
    return (logprobs - batch.logprobs).clamp(-LIMIT, LIMIT)


def ratio_metrics(log_ratios: Tensor) -> Metrics:
    """Return the metrics ratio and kl_behaviour.

    The latter is the k3 estimate of KL(behaviour || policy) in nats, which is never negative.
    """
    detached = log_ratios.detach()
    ratio = torch.exp(detached)
    return {"ratio": ratio, "kl_behaviour": ratio - 1.0 - detached}


def with_gradient(value: Tensor, logprobs: Tensor) -> Tensor:
    """Return `value` [N], with gradient value * grad log pi(token), as in a score-function estimator."""
    return value.detach() * torch.exp(logprobs - logprobs.detach())


def check_bounds(kind: str, low: float, high: float) -> None:
    """Raise ConfigError unless [1 - low, 1 + high] are valid bounds for ratios."""
    if not (0 <= low <= 1 and high >= 0):
        raise ConfigError(f"loss {kind!r}: clip_low must be in [0, 1] and clip_high >= 0, got {low}, {high}")


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) [N], and whether its gradient is cut, bool[N]."""
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    return loss, ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
