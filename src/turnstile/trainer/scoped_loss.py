"""Losses whose value at a token depends on tokens in other packed batches.

A sequence's ratio, a pair of trajectories or a quantile of the step must not depend on packing. If tokens that such a
loss needs together lie in several forests, their log-probabilities are first computed without gradient, and the loss is
evaluated on all of them at once. The forests then receive its derivatives with respect to each token's log-probability
and entropy. Their usual backward pass gives the same gradient, at the cost of one more forward pass and no more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from turnstile.batching.batch import Batch, join
from turnstile.losses.base import Metrics, Scope

Measure = Callable[[Batch], tuple[Tensor, Tensor]]
"""A forest -> its tokens' log-probabilities [N] and entropies [N]."""

Evaluate = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Metrics]]
"""(logprobs [N], entropy [N], batch) -> (loss [N], metrics)."""

_METRIC = "metric:"


def is_cut(forests: Sequence[Batch], scope: Scope) -> bool:
    """Return whether tokens that must be in one batch are in several."""
    match scope:
        case "":
            return False
        case "step":
            return len(forests) > 1
        case unit:
            parts = [getattr(forest, unit).unique() for forest in forests]
            return sum(len(part) for part in parts) > len(torch.cat(parts).unique())


def solve(forests: Sequence[Batch], evaluate: Evaluate, measure: Measure) -> tuple[list[Batch], Evaluate]:
    """Return forests with the loss of their tokens and its derivatives as extras, and the function that reads it."""
    with torch.no_grad():
        measured = [measure(forest) for forest in forests]
    logprobs, entropy = (torch.cat(parts).requires_grad_() for parts in zip(*measured, strict=True))
    together = join(forests)
    loss, metrics = evaluate(logprobs, entropy, together)
    by_logprob, by_entropy = torch.autograd.grad(
        (loss * together.weights).sum(), (logprobs, entropy), allow_unused=True, materialize_grads=True
    )
    solved = {"loss": loss.detach(), "by_logprob": by_logprob, "by_entropy": by_entropy}
    solved |= {_METRIC + name: value for name, value in metrics.items()}
    sizes = [len(forest.target) for forest in forests]
    parts = {name: values.split(sizes) for name, values in solved.items()}
    return [
        replace(forest, extras={name: values[i] for name, values in parts.items()}) for i, forest in enumerate(forests)
    ], _linearised


def _linearised(logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return the solved loss, linearised so that weight * loss has the solved derivative as its gradient."""
    solved = batch.extras
    slope = solved["by_logprob"] * (logprobs - logprobs.detach()) + solved["by_entropy"] * (entropy - entropy.detach())
    weights = batch.weights.to(slope.dtype)
    share = torch.where(weights != 0, slope / torch.where(weights != 0, weights, 1), 0)
    return solved["loss"] + share, {
        name.removeprefix(_METRIC): value for name, value in solved.items() if name.startswith(_METRIC)
    }
