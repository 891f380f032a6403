"""GSPO, a clipped policy gradient that uses the ratio of whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.losses.base import Metrics, needs
from turnstile.losses.ratio import check_bounds, clipped_surrogate, log_ratio, ratio_metrics, with_gradient
from turnstile.losses.units import Unit, mean_within, units


@declare(at(), at(unit="turn", clip_low=0.1, clip_high=0.1))
@needs(scope="unit")
def gspo(
    logprobs: Tensor, batch: Batch, *, clip_low: float = 3e-4, clip_high: float = 4e-4, unit: Unit = "trajectory"
) -> tuple[Tensor, Metrics]:
    """Return the clipped policy-gradient loss with the ratio of each token's sequence (GSPO, arXiv 2507.18071).

    The loss of each token is -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), with s = exp(mean of log pi - log
    behaviour over the sequence's tokens) and the paper's bounds. This is the paper's token form (equations 13 and 14):
    s_t = sg[s] * pi / sg[pi], so a token's gradient is s * A * grad log pi, and every token may have its own advantage.
    If all tokens of a sequence share advantage and weight, value and gradient are those of the sequence form;
    `loss_aggregation = "trajectory"` is the paper's mean over sequences. `unit` is the sequence: all tokens that a
    trajectory sampled, however often its context was rewritten, or one turn. Tokens of weight 0 do not count in s.

    logprobs f32[N] -> loss f32[N]; metrics ratio (the sequence's), kl_behaviour (nats, the token's), clipped. Raises
    ConfigError for invalid bounds or an unknown unit.
    """
    check_bounds("gspo", clip_low, clip_high)
    log_ratios = log_ratio(logprobs, batch).detach()
    ratio = torch.exp(mean_within(log_ratios, units(batch, unit, "gspo"), batch.weights))
    loss, clipped = clipped_surrogate(with_gradient(ratio, logprobs), batch.advantages, clip_low, clip_high)
    return loss, {**ratio_metrics(log_ratios), "ratio": ratio, "clipped": clipped.to(logprobs.dtype)}
