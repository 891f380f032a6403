"""A loss and the factors that multiply it, as one loss."""

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


def weighted(loss: TokenLoss, factors: Sequence[LossMultiplier]) -> TokenLoss:
    """The loss of each token times all factors. Where one of them is an off-policy correction, which has already paid
    for the way from the sampler to the proximal policy, the loss takes that one for the policy that sampled."""
    if not factors:
        return loss
    asked: Needs = functools.reduce(operator.or_, map(needs_of, factors), needs_of(loss))
    corrects = any(PROXIMAL in needs_of(factor).extras for factor in factors)

    @needs(*asked.extras, whole=asked.whole, entropy_gradient=asked.entropy_gradient)
    def product(logprobs: Tensor, batch: Batch, **knobs: Any) -> tuple[Tensor, Metrics]:
        below = replace(batch, logprobs=batch.extras[PROXIMAL]) if corrects and PROXIMAL in batch.extras else batch
        result, metrics = loss(logprobs, below, **knobs)
        for factor in factors:
            number, found = factor(batch)
            result = result * number
            metrics = {**metrics, **found}
        return result, metrics

    return product
