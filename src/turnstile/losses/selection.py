"""Which tokens learn."""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import CHOSEN, Metrics, extra, needs


@declare(at(CHOSEN))
@needs(whole="step")
def high_entropy_only(batch: Batch, *, share: float = 0.2) -> tuple[Tensor, Metrics]:
    """1 for the `share` of the step's tokens with the highest entropy, 0 for the others: only forks learn (arXiv
    2506.01939, whose 20 % this is; DART, arXiv 2509.23866, does the same with turns of computer use).

    The weights of the others are not given to those that learn, as in the paper, which divides by all tokens. Tokens
    that tie with the last one in learn too. Those of weight 0 have no part in it.

    Factor f32[N]; metric learns (the factor). Raises ConfigError for a share that makes no sense.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"factor 'high_entropy_only': share lies in (0, 1], got {share}")
    entropy = extra(batch, "entropy", "high_entropy_only").detach()
    counted = entropy[batch.weights != 0]
    if not len(counted):
        return torch.zeros_like(entropy), {"learns": torch.zeros_like(entropy)}
    least = counted.topk(max(1, int(share * len(counted)))).values[-1]
    factor = ((entropy >= least) & (batch.weights != 0)).to(entropy.dtype)
    return factor, {"learns": factor}
