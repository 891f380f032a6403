"""PPO, a clipped policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import Metrics
from turnstile.losses.ratio import check_bounds, clipped_surrogate, log_ratio, ratio_metrics


@declare(at(), at(clip_low=0.1, clip_high=0.3, dual_clip=3.0))
def ppo(
    logprobs: Tensor, batch: Batch, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return PPO's clipped policy-gradient loss (arXiv 1707.06347).

    The loss of each token is -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), with separate bounds as in
    DAPO (arXiv 2503.14476). `dual_clip` c > 1 bounds the loss of a token with A < 0 by -c * A, however large its ratio
    (arXiv 1912.09729). The ratio is to `batch.logprobs`, the sampling policy.

    logprobs f32[N] -> loss f32[N]; metrics ratio, kl_behaviour (nats), clipped (1 where the gradient is cut). Raises
    ConfigError for invalid bounds.
    """
    check_bounds("ppo", clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1:
        raise ConfigError(f"loss 'ppo': dual_clip must be above 1, got {dual_clip}")
    advantages = batch.advantages
    log_ratios = log_ratio(logprobs, batch)
    ratio = torch.exp(log_ratios)
    loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        beyond = (advantages < 0) & (loss > bound)
        loss = torch.where(beyond, bound, loss)
        clipped = clipped | beyond
    return loss, {**ratio_metrics(log_ratios), "clipped": clipped.to(logprobs.dtype)}
