"""Clipped policy gradient in which clipped tokens keep a bounded gradient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import Metrics
from turnstile.losses.ratio import check_bounds, clipped_surrogate, log_ratio, ratio_metrics, with_gradient


@declare(at(), at(clip_low=0.1, clip_high=0.1, keep="both"))
def entropy_balanced_clip(
    logprobs: Tensor,
    batch: Batch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    keep: Literal["high", "both"] = "high",
) -> tuple[Tensor, Metrics]:
    """Return PPO's loss, with a bounded gradient instead of 0 for clipped tokens (AEPO, arXiv 2510.14545).

    If ratio > 1 + clip_high and A > 0, the ratio is replaced by (1 + clip_high) / sg[ratio] * ratio, so its gradient is
    (1 + clip_high) * A * grad log pi. High-entropy tokens, which move furthest and are clipped first, then still learn
    at a bounded rate. `keep = "both"` does the same at the lower bound if A < 0 (GPPO, arXiv 2508.07629). The paper's
    abstract says that the stop-gradient is in the clipping term of high-entropy tokens. That this is the upper bound at
    A > 0, for tokens of any entropy, and the default of clip_high (DAPO's) rest on our reading, not on a second source.

    logprobs f32[N] -> loss f32[N]; metrics ratio, kl_behaviour (nats), clipped (1 where the gradient is cut or at its
    bound). Raises ConfigError for invalid bounds.
    """
    check_bounds("entropy_balanced_clip", clip_low, clip_high)
    if keep not in ("high", "both"):
        raise ConfigError(f"loss 'entropy_balanced_clip': keep must be 'high' or 'both', got {keep!r}")
    log_ratios = log_ratio(logprobs, batch)
    ratio = torch.exp(log_ratios)
    loss, clipped = clipped_surrogate(ratio, batch.advantages, clip_low, clip_high)
    kept = clipped if keep == "both" else clipped & (batch.advantages > 0)
    bounded = with_gradient(ratio.clamp(1 - clip_low, 1 + clip_high), logprobs)
    loss = torch.where(kept, -bounded * batch.advantages, loss)
    return loss, {**ratio_metrics(log_ratios), "clipped": clipped.to(logprobs.dtype)}
