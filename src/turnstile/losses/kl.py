"""The KL penalty towards a reference policy."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import NO_REWARD, Metrics, extra, needs
from turnstile.losses.ratio import LIMIT, log_ratio

Estimator = Literal["k1", "k2", "k3"]


@declare(*(at(NO_REWARD, estimator=estimator) for estimator in ("k1", "k2", "k3")))
@needs("ref_logprobs")
def kl(logprobs: Tensor, batch: Batch, *, estimator: Estimator = "k3") -> tuple[Tensor, Metrics]:
    """Return KL(pi || reference), estimated at each sampled token from `batch.extras["ref_logprobs"]` f32[N].

    With d = log pi - log reference the value is k1 = d (unbiased), k2 = d^2 / 2 (biased, small variance) or k3 =
    exp(-d) - 1 + d (unbiased, never negative). The gradient is always that of the divergence itself: ratio * d * grad
    log pi, with ratio = pi / behaviour held constant. Differentiating k1 would only give zero-mean noise, and
    differentiating k3 the gradient of the opposite divergence (arXiv 2506.09477; checked in the tests against the exact
    gradient of a categorical policy).

    logprobs f32[N] -> loss f32[N]; metric kl_ref (nats). Raises ConfigError without a reference.
    """
    value = divergence(logprobs, batch, extra(batch, "ref_logprobs", "kl"), estimator, "kl")
    return value, {"kl_ref": value.detach()}


def divergence(logprobs: Tensor, batch: Batch, anchor_logprobs: Tensor, estimator: Estimator, loss_name: str) -> Tensor:
    """Return KL(pi || anchor), estimated at each token from the anchor's log-probabilities f32[N].

    The gradient is that of `kl`. Raises ConfigError, which names the loss `loss_name`, for an unknown estimator.
    """
    distance = (logprobs - anchor_logprobs).clamp(-LIMIT, LIMIT)
    match estimator:
        case "k1":
            value = distance
        case "k2":
            value = distance.square() / 2
        case "k3":
            value = torch.exp(-distance) - 1 + distance
        case _:
            raise ConfigError(f"loss {loss_name!r}: estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")
    ratio = torch.exp(log_ratio(logprobs, batch)).detach()
    slope = ratio * distance.square() / 2  # its gradient is ratio * d * grad log pi
    return value.detach() + slope - slope.detach()
