"""Clip-Cov and KL-Cov, which keep the entropy up by restraining tokens with a high covariance.

An update lowers the entropy by the covariance of log-probability and advantage, and a few tokens account for nearly all
of it (arXiv 2505.22617). The contribution of one token is c = (log pi - mean log pi) * (A - mean A), with means over
the step's tokens of non-zero weight. Clip-Cov's selection over all tokens of an update, and its defaults, were checked
against the authors' code in verl; KL-Cov follows its description in the paper.
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
@needs(scope="step")
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
    """Return PPO's loss, set to 0 for a random `share` of the tokens, drawn from those of high covariance.

    Clip-Cov, arXiv 2505.22617. The drawn tokens have low < c < high and are not clipped by PPO. `share` is relative to
    all tokens of non-zero weight; at least one token is drawn if any is eligible. The draw depends on the token alone:
    its group, attempt, turn, id and recorded log-probability.

    logprobs f32[N] -> loss f32[N]; metrics ratio, kl_behaviour (nats), clipped (by PPO or drawn), covariance. Raises
    ConfigError for an invalid share or invalid bounds.
    """
    check_bounds("clip_cov", clip_low, clip_high)
    log_ratios = log_ratio(logprobs, batch)
    loss, clipped = clipped_surrogate(torch.exp(log_ratios), batch.advantages, clip_low, clip_high)
    covariance = _covariance(logprobs, batch)
    eligible = (covariance > low) & (covariance < high) & ~clipped & (batch.weights != 0)
    drawn = _top_among(_token_hash(batch), eligible, _count("clip_cov", share, batch))
    metrics = {**ratio_metrics(log_ratios), "clipped": (clipped | drawn).to(loss.dtype), "covariance": covariance}
    return torch.where(drawn, 0, loss), metrics


@declare(at(CHOSEN, share=0.2))
@needs(scope="step")
def kl_cov(logprobs: Tensor, batch: Batch, *, share: float = 2e-4, coef: float = 1.0) -> tuple[Tensor, Metrics]:
    """Return -ratio * A, with a penalty on the tokens of largest covariance (KL-Cov, arXiv 2505.22617).

    The penalty is coef * |log pi - log behaviour|, for the `share` of all tokens (at least one) with the largest c.
    Only tokens with c > 0 are penalised, so none are if all advantages are equal.

    logprobs f32[N] -> loss f32[N]; metrics ratio, kl_behaviour (nats), held (1 where a token is penalised), covariance.
    Raises ConfigError for an invalid share.
    """
    log_ratios = log_ratio(logprobs, batch)
    covariance = _covariance(logprobs, batch)
    held = _top_among(covariance, (covariance > 0) & (batch.weights != 0), _count("kl_cov", share, batch))
    loss = -torch.exp(log_ratios) * batch.advantages + torch.where(held, coef * log_ratios.abs(), 0)
    return loss, {**ratio_metrics(log_ratios), "held": held.to(loss.dtype), "covariance": covariance}


def _covariance(logprobs: Tensor, batch: Batch) -> Tensor:
    step = torch.zeros_like(batch.target)

    def centred(values: Tensor) -> Tensor:
        return values - mean_within(values, step, batch.weights)

    return centred(logprobs.detach()) * centred(batch.advantages)


def _count(kind: str, share: float, batch: Batch) -> int:
    if not 0 < share <= 1:
        raise ConfigError(f"loss {kind!r}: share must be in (0, 1], got {share}")
    return max(1, int(share * int((batch.weights != 0).sum())))


def _top_among(values: Tensor, eligible: Tensor, count: int) -> Tensor:
    """Return bool[N], true at the `count` largest values among the eligible ones, or at all eligible ones if fewer."""
    chosen = torch.zeros_like(eligible)
    places = eligible.nonzero()[:, 0]
    chosen[places[values[places].topk(min(count, len(places))).indices]] = True
    return chosen


def _token_hash(batch: Batch) -> Tensor:
    """Return i64[N], a pseudo-random number for each token that depends on that token alone.

    Integer multiplications wrap around.
    """
    digest = batch.logprobs.double().view(torch.int64)
    for field in (batch.group, batch.attempt, batch.turn, batch.target):
        digest = (digest ^ field) * 0x5851F42D4C957F2D
        digest = digest ^ (digest >> 29)
    return digest * 0x14057B7EF767814F
