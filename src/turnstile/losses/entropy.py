"""A bonus for staying undecided."""

from __future__ import annotations

from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.losses.base import NO_REWARD, Metrics, extra, needs


@declare(at(NO_REWARD))
@needs(entropy_gradient=True)
def entropy(logprobs: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
    """-H(pi) at each token, in nats, with the gradient of the exact entropy over the vocabulary: a regulariser with
    coef > 0 keeps the policy undecided (Williams and Peng 1991; A3C, arXiv 1602.01783).

    H is that of the distribution that was sampled from, after temperature and truncation. Its gradient takes the
    tokens' logits once more in memory.

    logprobs f32[N] -> loss f32[N]; metric entropy (nats).
    """
    value = extra(batch, "entropy", "entropy")
    return -value, {"entropy": value.detach()}
