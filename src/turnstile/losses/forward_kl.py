"""The forward divergence from a reference policy, which penalises forgetting."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import NO_REWARD, Metrics, extra, needs
from turnstile.losses.ratio import LIMIT


@declare(at(NO_REWARD), at(NO_REWARD, estimator="k1"))
@needs("ref_logprobs")
def forward_kl(
    logprobs: Tensor, batch: Batch, *, estimator: Literal["k1", "k3"] = "k3", cap: float = 10.0
) -> tuple[Tensor, Metrics]:
    """Return KL(reference || pi), estimated at each token; it is large where pi forgets a behaviour of the reference.

    DPH-RL, arXiv 2509.07430. With r = pi / reference and w = min(reference / behaviour, cap), held constant, the loss
    is w * -log r (k1) or w * (r - 1 - log r) (k3, which is never negative and has the same expected gradient with less
    noise). The paper computes the forward KL on samples of the reference that were stored before RL began
    (`[rehearsal]` in a recipe). The recorded log-probabilities are then the reference's own, and w is 1. On tokens that
    the policy sampled, w is an importance weight for each token; it cannot correct for tokens that the policy no longer
    samples.

    logprobs f32[N] -> loss f32[N]; metric kl_forward (nats). Raises ConfigError without a reference, and for an invalid
    estimator or cap.
    """
    if estimator not in ("k1", "k3"):
        raise ConfigError(f"loss 'forward_kl': estimator must be 'k1' or 'k3', got {estimator!r}")
    if cap <= 0:
        raise ConfigError(f"loss 'forward_kl': cap must be above 0, got {cap}")
    reference = extra(batch, "ref_logprobs", "forward_kl")
    weight = torch.exp((reference - batch.logprobs).clamp(-LIMIT, LIMIT)).clamp(max=cap)
    log_r = (logprobs - reference).clamp(-LIMIT, LIMIT)
    loss = weight * (-log_r if estimator == "k1" else torch.exp(log_r) - 1 - log_r)
    return loss, {"kl_forward": loss.detach()}
