"""The entropy bonus."""

from __future__ import annotations

from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.losses.base import NO_REWARD, Metrics, extra, needs


@declare(at(NO_REWARD))
@needs(entropy_gradient=True)
def entropy(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return -H(pi) at each token, in nats, with the gradient of the exact entropy over the vocabulary.

    As a regulariser with coef > 0 it keeps the policy's entropy up (Williams and Peng 1991; A3C, arXiv 1602.01783). H
    is the entropy of the sampling distribution, after temperature and truncation. Its gradient needs memory for a
    second copy of the tokens' logits.

    logprobs f32[N] -> loss f32[N]; metric entropy (nats).
    """
    value = extra(batch, "entropy", "entropy")
    return -value, {"entropy": value.detach()}
