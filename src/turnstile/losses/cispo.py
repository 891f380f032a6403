"""CISPO, a policy gradient with a clipped importance weight."""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.losses.base import Metrics
from turnstile.losses.ratio import check_bounds, log_ratio, ratio_metrics


def cispo(logprobs: Tensor, batch: Batch, *, clip_low: float = 1.0, clip_high: float = 4.0) -> tuple[Tensor, Metrics]:
    """Return CISPO's loss, a policy gradient whose importance weight is clipped (arXiv 2506.13585).

    The loss of each token is -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * log pi. The ratio to the sampling
    policy is a constant weight, so every token keeps a gradient, including rare tokens at a fork. As in the paper there
    is no lower bound by default (clip_low = 1). The paper does not print its upper bound; the default, weights up to 5,
    is about what ScaleRL (arXiv 2510.13786) uses, quoted from memory.

    logprobs f32[N] -> loss f32[N]; metrics ratio, kl_behaviour (nats), clipped (1 where the weight is at a bound).
    Raises ConfigError for invalid bounds.
    """
    check_bounds("cispo", clip_low, clip_high)
    log_ratios = log_ratio(logprobs, batch).detach()
    ratio = torch.exp(log_ratios)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -weight * batch.advantages * logprobs
    return loss, {**ratio_metrics(log_ratios), "clipped": (weight != ratio).to(logprobs.dtype)}
