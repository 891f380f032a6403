"""GMPO, a policy gradient with the geometric mean of clipped ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import Metrics, needs
from turnstile.losses.ratio import log_ratio, ratio_metrics, with_gradient
from turnstile.losses.units import Unit, mean_within, units


@declare(at(), at(unit="turn", clip_low=0.1, clip_high=0.1))
@needs(scope="unit")
def gmpo(
    logprobs: Tensor, batch: Batch, *, clip_low: float = 0.4, clip_high: float = 0.4, unit: Unit = "trajectory"
) -> tuple[Tensor, Metrics]:
    """Return -s * A for each token, with s the geometric mean of its sequence's clipped ratios (arXiv 2507.20673).

    s = exp(mean over the sequence of clipped log-ratios). A log-ratio is log pi - log behaviour, clipped from above at
    clip_high if A > 0 and from below at -clip_low if A < 0 (by default at ratios e^0.4 and e^-0.4, as in the paper). A
    token's gradient is s * A * grad log pi, and 0 where its own ratio is clipped. This is the paper's gradient, with
    `loss_aggregation = "trajectory"`, if all tokens of a sequence have the same advantage; otherwise each token uses
    its own. `unit` is the sequence: a trajectory, or one turn. Tokens of weight 0 do not count in s. That the bounds
    are on the logarithm, and one-sided by the advantage's sign, was checked against the authors' loss in verl.

    logprobs f32[N] -> loss f32[N]; metrics ratio (s), kl_behaviour (nats, the token's), clipped. Raises ConfigError for
    invalid bounds or an unknown unit.
    """
    if not (clip_low >= 0 and clip_high >= 0):
        raise ConfigError(f"loss 'gmpo': clip_low and clip_high must be >= 0, got {clip_low}, {clip_high}")
    advantages = batch.advantages
    log_ratios = log_ratio(logprobs, batch).detach()
    clipped = ((advantages > 0) & (log_ratios > clip_high)) | ((advantages < 0) & (log_ratios < -clip_low))
    kept = torch.where(clipped, log_ratios.clamp(-clip_low, clip_high), log_ratios)
    ratio = torch.exp(mean_within(kept, units(batch, unit, "gmpo"), batch.weights))
    loss = -torch.where(clipped, ratio, with_gradient(ratio, logprobs)) * advantages
    return loss, {**ratio_metrics(log_ratios), "ratio": ratio, "clipped": clipped.to(logprobs.dtype)}
