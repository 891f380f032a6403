"""The ratio between the policy and the one that sampled, kept finite, with its diagnostics."""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.losses.base import Metrics

LIMIT = 20.0
"""Log-ratios are cut at +-20, so that a token of weight 0 has gradient 0 and never 0 * inf."""


def log_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """log pi(token) - log pi_behaviour(token), f32[N], within +-LIMIT."""
    return (logprobs - batch.logprobs).clamp(-LIMIT, LIMIT)


def ratio_metrics(log_ratios: Tensor) -> Metrics:
    """ratio, and kl_behaviour: the k3 estimate of KL(behaviour || policy) in nats, never negative."""
    detached = log_ratios.detach()
    ratio = torch.exp(detached)
    return {"ratio": ratio, "kl_behaviour": ratio - 1.0 - detached}
