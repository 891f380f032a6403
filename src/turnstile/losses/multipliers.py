"""Combination of a loss and its multipliers into one loss."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.losses.base import LossMultiplier, Metrics, Needs, TokenLoss, needs, needs_of

PROXIMAL = "proximal_logprobs"


def with_multipliers(loss: TokenLoss, multipliers: Sequence[LossMultiplier]) -> TokenLoss:
    """Return a loss that is multiplied, at each token, by all multipliers.

    An off-policy correction already accounts for the difference between the sampler and the proximal policy. If there
    is one, the loss treats the proximal policy as the sampling policy.
    """
    if not multipliers:
        return loss
    combined: Needs = functools.reduce(operator.or_, map(needs_of, multipliers), needs_of(loss))
    corrects = any(PROXIMAL in needs_of(multiplier).extras for multiplier in multipliers)

    @needs(*combined.extras, scope=combined.scope, entropy_gradient=combined.entropy_gradient)
    def product(logprobs: Tensor, batch: Batch, **knobs: Any) -> tuple[Tensor, Metrics]:
        below = replace(batch, logprobs=batch.extras[PROXIMAL]) if corrects and PROXIMAL in batch.extras else batch
        result, metrics = loss(logprobs, below, **knobs)
        for multiplier in multipliers:
            number, extra_metrics = multiplier(batch)
            result = result * number
            metrics = {**metrics, **extra_metrics}
        return result, metrics

    return product
