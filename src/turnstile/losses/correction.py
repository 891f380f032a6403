"""Off-policy corrections: importance weights for the mismatch between sampler and trainer.

Each kind is a loss multiplier w(rho) with rho = proximal / behaviour: the policy before the step as computed by the
trainer (`batch.extras["proximal_logprobs"]` f32[N]) over the policy as computed by the sampler (`batch.logprobs`). The
multiplied loss is then relative to the proximal policy (`losses.multipliers.with_multipliers`). `unit` selects the unit
of rho: one token, or the product over a turn or trajectory. `mean = true` takes the geometric mean instead, which does
not shrink or grow with length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import Metrics, extra, needs
from turnstile.losses.ratio import LIMIT
from turnstile.losses.units import Unit, mean_within, sum_within, units


@declare(at(cap=1.1), at(unit="turn"))
@needs("proximal_logprobs", scope="unit")
def tis(batch: Batch, *, cap: float = 2.0, unit: Unit = "token", mean: bool = False) -> tuple[Tensor, Metrics]:
    """Return min(rho, cap), as in truncated importance sampling.

    Yao and others 2025, "Your efficient RL framework secretly brings you off-policy RL training"; the bound goes back
    to IMPALA, arXiv 1802.01561.

    Returns the multiplier f32[N]; metrics correction (the multiplier), corrected (1 where it is not rho), kl_mismatch
    (nats). Raises ConfigError for invalid bounds or an unknown unit, and without proximal log-probabilities.
    """
    _check("tis", 0.0, cap)
    rho, metrics = _rho(batch, "tis", unit, mean)
    return _finish(rho.clamp(max=cap), rho, metrics)


@declare(at(cap=1.1), at(unit="turn", mean=True))
@needs("proximal_logprobs", scope="unit")
def mis(batch: Batch, *, cap: float = 2.0, unit: Unit = "trajectory", mean: bool = False) -> tuple[Tensor, Metrics]:
    """Return rho where rho <= cap, else 0, as in masked importance sampling.

    Liu and others 2025, "When speed kills stability".

    Returns the multiplier f32[N]; metrics and errors as for `tis`.
    """
    _check("mis", 0.0, cap)
    rho, metrics = _rho(batch, "mis", unit, mean)
    return _finish(torch.where(rho <= cap, rho, 0), rho, metrics)


@declare(at(low=0.9, high=1.2))
@needs("proximal_logprobs", scope="unit")
def icepop(
    batch: Batch, *, low: float = 0.5, high: float = 5.0, unit: Unit = "token", mean: bool = False
) -> tuple[Tensor, Metrics]:
    """Return rho where low <= rho <= high, else 0, which masks on both sides.

    IcePop, in Ring-1T, arXiv 2510.18855; other implementations use bounds from 0.2 to 5.

    Returns the multiplier f32[N]; metrics and errors as for `tis`.
    """
    _check("icepop", low, high)
    rho, metrics = _rho(batch, "icepop", unit, mean)
    return _finish(torch.where((rho >= low) & (rho <= high), rho, 0), rho, metrics)


def _check(kind: str, low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ConfigError(f"loss multiplier {kind!r}: bounds must be 0 <= low < high (or cap), got {low}, {high}")


def _rho(batch: Batch, kind: str, unit: Unit, mean: bool) -> tuple[Tensor, Metrics]:
    """Return rho of each token's unit [N], and the metric kl_mismatch: the k3 estimate of KL(behaviour || proximal)."""
    log_rho = (extra(batch, "proximal_logprobs", kind) - batch.logprobs).clamp(-LIMIT, LIMIT)
    metrics = {"kl_mismatch": torch.exp(log_rho) - 1 - log_rho}
    if unit != "token":
        index = units(batch, unit, kind)
        if mean:
            log_rho = mean_within(log_rho, index, batch.weights)
        else:
            log_rho = sum_within(log_rho, index, batch.weights)[index].to(log_rho.dtype)
    return torch.exp(log_rho.clamp(-LIMIT, LIMIT)), metrics


def _finish(multiplier: Tensor, rho: Tensor, metrics: Metrics) -> tuple[Tensor, Metrics]:
    return multiplier, {**metrics, "correction": multiplier, "corrected": (multiplier != rho).to(rho.dtype)}
