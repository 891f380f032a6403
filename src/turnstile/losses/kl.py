"""Keeping near a reference policy."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError
from turnstile.losses.base import Metrics
from turnstile.losses.ratio import LIMIT, log_ratio


def kl(logprobs: Tensor, batch: Batch, *, estimator: Literal["k1", "k2", "k3"] = "k3") -> tuple[Tensor, Metrics]:
    """KL(pi || reference), estimated at each sampled token from `batch.extras["ref_logprobs"]` f32[N].

    With d = log pi - log reference the value is k1 = d (unbiased), k2 = d^2 / 2 (biased, small variance) or
    k3 = exp(-d) - 1 + d (unbiased, never negative). The gradient is that of the divergence itself whichever value
    is shown: ratio * d * grad log pi, with ratio = pi / behaviour held constant. Differentiating k1 would give
    noise of mean zero, and k3 the gradient of the opposite divergence (arXiv 2506.09477; checked in the tests
    against the exact gradient of a categorical policy).

    logprobs f32[N] -> loss f32[N]; metric kl_ref (nats). Raises ConfigError without a reference.
    """
    if "ref_logprobs" not in batch.extras:
        have = ", ".join(sorted(batch.extras)) or "none"
        raise ConfigError(
            "loss 'kl' needs the reference policy's log-probabilities, but the batch has no extra 'ref_logprobs' "
            f"(extras: {have}); give the run a reference model or leave 'kl' out"
        )
    distance = (logprobs - batch.extras["ref_logprobs"]).clamp(-LIMIT, LIMIT)
    match estimator:
        case "k1":
            value = distance
        case "k2":
            value = distance.square() / 2
        case "k3":
            value = torch.exp(-distance) - 1 + distance
        case _:
            raise ConfigError(f"loss 'kl': estimator is k1, k2 or k3, got {estimator!r}")
    ratio = torch.exp(log_ratio(logprobs, batch)).detach()
    slope = ratio * distance.square() / 2  # its gradient is ratio * d * grad log pi
    loss = value.detach() + slope - slope.detach()
    return loss, {"kl_ref": value.detach()}
