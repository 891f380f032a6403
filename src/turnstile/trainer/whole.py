"""Losses whose value at one token depends on tokens that were packed elsewhere.

A sequence's ratio, a pair of trajectories or a quantile of the step must not change with packing. Where the tokens
that such a loss sees together lie in several forests, their log-probabilities are computed once without a gradient,
the loss is taken on all of them at once, and its derivatives by each token's log-probability and entropy go back to
the forests: the usual pass with them has the same gradient, for one more forward pass and no more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from turnstile.batching.batch import Batch, join
from turnstile.losses.base import Metrics, Whole

Measure = Callable[[Batch], tuple[Tensor, Tensor]]
"""A forest -> its tokens' log-probabilities [N] and entropies [N]."""

Evaluate = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Metrics]]
"""(logprobs [N], entropy [N], batch) -> (loss [N], metrics)."""

_METRIC = "metric:"


def is_cut(forests: Sequence[Batch], whole: Whole) -> bool:
    """Whether something that must lie in one forest lies in several."""
    match whole:
        case "":
            return False
        case "step":
            return len(forests) > 1
        case unit:
            parts = [getattr(forest, unit).unique() for forest in forests]
            return sum(len(part) for part in parts) > len(torch.cat(parts).unique())


def solve(forests: Sequence[Batch], evaluate: Evaluate, measure: Measure) -> tuple[list[Batch], Evaluate]:
    """Forests that carry the loss of their tokens and its derivatives, and what to evaluate them with."""
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
    ], _linear


def _linear(logprobs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
    """The loss that was found, with a gradient that is what was found for it once the weights are multiplied in."""
    solved = batch.extras
    slope = solved["by_logprob"] * (logprobs - logprobs.detach()) + solved["by_entropy"] * (entropy - entropy.detach())
    weights = batch.weights.to(slope.dtype)
    share = torch.where(weights != 0, slope / torch.where(weights != 0, weights, 1), 0)
    return solved["loss"] + share, {
        name.removeprefix(_METRIC): value for name, value in solved.items() if name.startswith(_METRIC)
    }
