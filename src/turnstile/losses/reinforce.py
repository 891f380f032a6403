"""REINFORCE, the plain policy gradient."""

from __future__ import annotations

from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.losses.base import Metrics
from turnstile.losses.ratio import log_ratio, ratio_metrics


def reinforce(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return -A * log pi(token) for each token (Williams 1992).

    Its gradient is unbiased only while the policy is still the one that sampled the tokens.

    logprobs f32[N] -> loss f32[N]; metrics ratio and kl_behaviour (nats), which show how far the policy has moved
    since.
    """
    return -batch.advantages * logprobs, ratio_metrics(log_ratio(logprobs, batch).detach())
