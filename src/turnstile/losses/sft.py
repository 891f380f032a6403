"""Supervised fine-tuning on given tokens."""

from __future__ import annotations

from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.losses.base import Metrics


def sft(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return -w * log pi(token) for each token, with the token's weight w in `batch.advantages`.

    w is 1 for plain SFT. A weight of 0 leaves a token out, and other weights scale its gradient.

    logprobs f32[N] -> loss f32[N]; metric nll (nats, without w).
    """
    return -batch.advantages * logprobs, {"nll": -logprobs.detach()}
