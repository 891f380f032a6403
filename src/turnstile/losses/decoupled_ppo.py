"""Decoupled PPO: clipped policy gradient for tokens sampled by an older policy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import Metrics, extra, needs
from turnstile.losses.ppo import ppo
from turnstile.losses.ratio import LIMIT


@declare(at(), at(cap=1.1))
@needs("proximal_logprobs")
def decoupled_ppo(
    logprobs: Tensor, batch: Batch, *, clip_low: float = 0.2, clip_high: float = 0.2, cap: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return PPO's loss relative to the proximal policy, importance-weighted for the sampling policy.

    The loss is -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), with r = pi / proximal and w = proximal /
    behaviour (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298). The clip is relative to the policy before the
    step (`batch.extras["proximal_logprobs"]` f32[N]) rather than to the sampling policy, which may be several versions
    older. The constant weight w corrects for that difference. Tokens with w above `cap` are left out, as in AReaL's
    code; None keeps all. The loss multipliers `tis`, `mis` and `icepop` apply the same idea with other bounds to any
    loss.

    logprobs f32[N] -> loss f32[N]; metrics ratio and kl_behaviour (nats) relative to the proximal policy, clipped,
    correction (w). Raises ConfigError without proximal log-probabilities, and for an invalid cap or invalid bounds.
    """
    if cap is not None and cap <= 0:
        raise ConfigError(f"loss 'decoupled_ppo': cap must be above 0, got {cap}")
    proximal = extra(batch, "proximal_logprobs", "decoupled_ppo")
    weight = torch.exp((proximal - batch.logprobs).clamp(-LIMIT, LIMIT))
    if cap is not None:
        weight = torch.where(weight <= cap, weight, 0)
    loss, metrics = ppo(logprobs, replace(batch, logprobs=proximal), clip_low=clip_low, clip_high=clip_high)
    return weight * loss, {**metrics, "correction": weight}
