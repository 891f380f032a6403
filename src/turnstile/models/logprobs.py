"""From hidden states to the log-probabilities of tokens, the same way in the sampler and the trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from turnstile.models.head import ChunkedHead, logits_at_once
from turnstile.types import Sampling

CHUNKS_KEPT = 4
"""Chunks whose distributions wait for the backward pass: 256 MiB on a CPU."""


def truncate(logits: Tensor, sampling: Sampling, keep: Tensor | None = None) -> Tensor:
    """Logits [N, V] with what top_k, top_p and min_p exclude set to -inf; `keep` i64[N] always stays.

    Applied after temperature, in this order, each on what the one before left.
    """
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0):
        return logits
    drop = torch.zeros_like(logits, dtype=torch.bool)
    if 0 < sampling.top_k < logits.shape[-1]:
        drop |= logits < logits.topk(sampling.top_k, dim=-1).values[:, -1:]
    if sampling.top_p < 1:
        ordered, index = logits.masked_fill(drop, float("-inf")).sort(dim=-1, descending=True)
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        beyond = torch.zeros_like(drop)
        beyond[:, 1:] = mass[:, :-1] >= sampling.top_p  # the token that crosses the line is still in
        drop |= torch.zeros_like(drop).scatter(1, index, beyond)
    if sampling.min_p > 0:
        p = logits.masked_fill(drop, float("-inf")).softmax(dim=-1)
        drop |= p < sampling.min_p * p.amax(dim=-1, keepdim=True)
    if keep is not None:
        drop = drop.scatter(1, keep[:, None], value=False)
    return logits.masked_fill(drop, float("-inf"))


def token_logprobs(
    model: PreTrainedModel,
    hidden: Tensor,
    target: Tensor,
    temperature: Tensor,
    sampling: Sampling,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of `target` i64[N] after `hidden` [N, H], and the entropies [N] in nats.

    `temperature` f32[N] is that of each token's sampling; the truncation of `sampling` is applied too. The entropies
    carry a gradient only where it is asked for: it holds [N, V] once more. For the backward pass the first
    `CHUNKS_KEPT` chunks are kept, and those after them computed again.
    """
    size, head = logits_at_once(model), ChunkedHead(model)

    def chunk(h: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        if entropy_gradient:
            return _picked_with_entropy(truncate(head.logits(h) / t[:, None], sampling, keep=y), y)
        logprobs, entropy = _Pick.apply(head.logits(h), y, t, sampling)  # type: ignore[no-untyped-call]
        return logprobs, entropy

    parts = []
    for number, begin in enumerate(range(0, len(target), size)):
        part = slice(begin, begin + size)
        arguments = (hidden[part], target[part], temperature[part])
        again = number >= CHUNKS_KEPT and torch.is_grad_enabled()
        parts.append(checkpoint(chunk, *arguments, use_reentrant=False) if again else chunk(*arguments))
    return head.joined(parts)


def _picked_with_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [n, V], target i64[n]) -> log-probabilities [n], entropies [n], both with a gradient."""
    logp = logits.log_softmax(dim=-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp.clamp(min=-1e4)).sum(dim=-1)


class _Pick(torch.autograd.Function):
    """(logits [n, V], target i64[n], temperature f32[n], sampling) -> log-probabilities [n], entropies [n].

    Uses the logits up, as nobody else wants them; what is kept of them is the distribution, which the backward pass
    uses up in turn.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        place = target[:, None]
        logits.div_(temperature[:, None])
        cut = truncate(logits, sampling, keep=target)
        if cut is not logits:
            logits = cut.clamp_(min=torch.finfo(cut.dtype).min)  # minus infinity times no probability is no number
        logp = logits.log_softmax(dim=-1)
        logprobs = logp.gather(1, place)
        norm = logits.gather(1, place) - logprobs
        p = logp.exp_()
        entropy = norm[:, 0] - logits.mul_(p).sum(dim=-1)
        ctx.save_for_backward(p, place, temperature)
        ctx.mark_non_differentiable(entropy)
        return logprobs[:, 0], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        p, place, temperature = ctx.saved_tensors
        each = (slope / temperature).to(p.dtype)[:, None]
        return p.mul_(-each).scatter_add_(1, place, each), None, None, None
