"""The objective: the shape of a token loss.

A loss works token by token on the N trained tokens and returns one value for each; how tokens are weighed
against each other was fixed before packing (`Batch.weights`), and is not a loss's business.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from turnstile.batching.batch import Batch

Metrics = dict[str, Tensor]
"""Per-token diagnostics f32[N] (detached), averaged over the step with the tokens' weights by the trainer."""


class TokenLoss(Protocol):
    """(logprobs f32[N], batch, **knobs) -> (loss f32[N], metrics). A loss is minimised."""

    def __call__(self, logprobs: Tensor, batch: Batch, **knobs: Any) -> tuple[Tensor, Metrics]: ...
