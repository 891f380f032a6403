"""Token selection by loss multipliers of 0 and 1."""

from __future__ import annotations

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.errors import ConfigError
from turnstile.losses.base import CHOSEN, Metrics, extra, needs


@declare(at(CHOSEN))
@needs(scope="step")
def high_entropy_only(batch: Batch, *, share: float = 0.2) -> tuple[Tensor, Metrics]:
    """Return 1 for the `share` of the step's tokens with the highest entropy, else 0 (arXiv 2506.01939).

    The paper trains on the 20 % of tokens at which a text can fork; DART (arXiv 2509.23866) does the same with turns of
    computer use. The weights of the other tokens are not redistributed, as in the paper, which divides by all tokens.
    Tokens that tie with the last selected one are selected too. Tokens of weight 0 do not count.

    Returns the multiplier f32[N], and the metric learns (the multiplier). Raises ConfigError for an invalid share.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"loss multiplier 'high_entropy_only': share must be in (0, 1], got {share}")
    entropy = extra(batch, "entropy", "high_entropy_only").detach()
    counted = entropy[batch.weights != 0]
    if not len(counted):
        return torch.zeros_like(entropy), {"learns": torch.zeros_like(entropy)}
    least = counted.topk(max(1, int(share * len(counted)))).values[-1]
    multiplier = ((entropy >= least) & (batch.weights != 0)).to(entropy.dtype)
    return multiplier, {"learns": multiplier}
