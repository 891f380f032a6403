"""Entropy kept up by holding back the few tokens whose likelihood and advantage go together most.

An update lowers the entropy by the covariance of log-probability and advantage, and a few tokens carry nearly all of
it (arXiv 2505.22617). At one token that is c = (log pi - mean log pi) * (A - mean A), means over the step's tokens;
those of weight 0 have no part in it. That Clip-Cov chooses over all tokens of an update, and its defaults, were
checked against the authors' code as verl carries it; KL-Cov follows its description in the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import CHOSEN, Metrics, needs
from turnstile.losses.ratio import check_bounds, clipped_surrogate, log_ratio, ratio_metrics
from turnstile.losses.units import mean_within


@declare(at(CHOSEN, share=0.2, low=0.05))
@needs(whole="step")
def clip_cov(
    logprobs: Tensor,
    batch: Batch,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """PPO's loss, and 0 for `share` of all tokens (one at least), drawn at random among those with low < c < high
    that PPO does not clip (Clip-Cov, arXiv 2505.22617).

    The draw depends on the token alone: its group, attempt, turn, id and recorded log-probability.

    logprobs f32[N] -> loss f32[N]; metrics ratio, kl_behaviour (nats), clipped (by PPO or drawn), covariance. Raises
    ConfigError for a share or bounds that make no sense.
    """
    check_bounds("clip_cov", clip_low, clip_high)
    log_ratios = log_ratio(logprobs, batch)
    loss, clipped = clipped_surrogate(torch.exp(log_ratios), batch.advantages, clip_low, clip_high)
    covariance = _covariance(logprobs, batch)
    able = (covariance > low) & (covariance < high) & ~clipped & (batch.weights != 0)
    drawn = _largest(_lots(batch), able, _count("clip_cov", share, batch))
    metrics = {**ratio_metrics(log_ratios), "clipped": (clipped | drawn).to(loss.dtype), "covariance": covariance}
    return torch.where(drawn, 0, loss), metrics


@declare(at(CHOSEN, share=0.2))
@needs(whole="step")
def kl_cov(logprobs: Tensor, batch: Batch, *, share: float = 2e-4, coef: float = 1.0) -> tuple[Tensor, Metrics]:
    """-ratio * A, plus coef * |log pi - log behaviour| for the `share` of all tokens (one at least) with the largest c
    (KL-Cov, arXiv 2505.22617). Only tokens with c > 0 are held back, none where all advantages are equal.

    logprobs f32[N] -> loss f32[N]; metrics ratio, kl_behaviour (nats), held (1 where a token is held back),
    covariance. Raises ConfigError for a share that makes no sense.
    """
    log_ratios = log_ratio(logprobs, batch)
    covariance = _covariance(logprobs, batch)
    held = _largest(covariance, (covariance > 0) & (batch.weights != 0), _count("kl_cov", share, batch))
    loss = -torch.exp(log_ratios) * batch.advantages + torch.where(held, coef * log_ratios.abs(), 0)
    return loss, {**ratio_metrics(log_ratios), "held": held.to(loss.dtype), "covariance": covariance}


def _covariance(logprobs: Tensor, batch: Batch) -> Tensor:
    step = torch.zeros_like(batch.target)

    def centred(values: Tensor) -> Tensor:
        return values - mean_within(values, step, batch.weights)

    return centred(logprobs.detach()) * centred(batch.advantages)


def _count(kind: str, share: float, batch: Batch) -> int:
    if not 0 < share <= 1:
        raise ConfigError(f"loss {kind!r}: share lies in (0, 1], got {share}")
    return max(1, int(share * int((batch.weights != 0).sum())))


def _largest(values: Tensor, able: Tensor, count: int) -> Tensor:
    """bool[N]: the `count` largest values among those that are able, or all of these."""
    chosen = torch.zeros_like(able)
    places = able.nonzero()[:, 0]
    chosen[places[values[places].topk(min(count, len(places))).indices]] = True
    return chosen


def _lots(batch: Batch) -> Tensor:
    """i64[N]: a random number for each token that depends on nothing but the token (multiplications wrap)."""
    lots = batch.logprobs.double().view(torch.int64)
    for field in (batch.group, batch.attempt, batch.turn, batch.target):
        lots = (lots ^ field) * 0x5851F42D4C957F2D
        lots = lots ^ (lots >> 29)
    return lots * 0x14057B7EF767814F
