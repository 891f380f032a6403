"""A penalty on entropy outside a band around its past mean."""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import NO_REWARD, Metrics, extra, needs


@declare(at(NO_REWARD))
@needs("entropy_past", entropy_gradient=True)
def entropy_band(logprobs: Tensor, batch: Batch, *, low: float = 0.8, high: float = 1.2) -> tuple[Tensor, Metrics]:
    """Return the distance, in nats, of a token's entropy H from the band [low * past, high * past].

    The loss is max(low * past - H, H - high * past, 0), with past the mean entropy of the trained tokens over all
    earlier optimiser steps (the smoothing of EPO, arXiv 2509.22576). As a regulariser beside `entropy`, its coef is the
    paper's lambda * beta. The paper prints a penalty that is constant outside the band and so has no gradient. The
    distance to the band, which has one, and the bounds are our reading, not verified against a second source.
    `batch.extras["entropy_past"]` f32[N] holds past; if it is NaN, as in the first step, the loss is 0.

    logprobs f32[N] -> loss f32[N]; metrics entropy (nats), outside (1 where H is outside the band). Raises ConfigError
    for invalid bounds.
    """
    if not 0 <= low <= high:
        raise ConfigError(f"loss 'entropy_band': the bounds must be 0 <= low <= high, got {low}, {high}")
    entropy = extra(batch, "entropy", "entropy_band")
    past = extra(batch, "entropy_past", "entropy_band")
    known = ~past.isnan()
    past = torch.where(known, past, 0)
    outside = torch.maximum((low * past - entropy).relu(), (entropy - high * past).relu())
    loss = torch.where(known, outside, 0)
    return loss, {"entropy": entropy.detach(), "outside": (loss.detach() > 0).to(logprobs.dtype)}
