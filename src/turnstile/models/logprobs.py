"""Log-probabilities of tokens from hidden states, under the distribution that the sampler draws from."""

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
"""Number of chunks whose distributions are kept for the backward pass, 256 MiB on a CPU."""


def truncate(logits: Tensor, sampling: Sampling, keep: Tensor | None = None) -> Tensor:
    """Return logits [N, V] in which the tokens that top_k, top_p and min_p exclude are -inf.

    The logits are already divided by the temperature. The filters apply in this order, each to what the previous one
    left. Token `keep[i]` (i64[N]) of row i is never excluded.
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
        beyond[:, 1:] = mass[:, :-1] >= sampling.top_p  # the token that crosses top_p stays
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
    """Return log-probabilities [N] of `target` i64[N] after `hidden` [N, H], and the entropies [N] in nats.

    `temperature` f32[N] is the sampling temperature of each token, and `sampling` determines the truncation. Entropies
    have a gradient only with `entropy_gradient`, which keeps another tensor of the logits' size. The first
    `CHUNKS_KEPT` chunks are kept for the backward pass, and later ones are recomputed.
    """
    size, head = logits_at_once(model), ChunkedHead(model)

    def chunk(h: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        if entropy_gradient:
            return _logprobs_and_entropies(truncate(head.logits(h) / t[:, None], sampling, keep=y), y)
        logprobs, entropy = _PickLogprobs.apply(head.logits(h), y, t, sampling)  # type: ignore[no-untyped-call]
        return logprobs, entropy

    parts = []
    for number, begin in enumerate(range(0, len(target), size)):
        part = slice(begin, begin + size)
        arguments = (hidden[part], target[part], temperature[part])
        recompute = number >= CHUNKS_KEPT and torch.is_grad_enabled()
        parts.append(checkpoint(chunk, *arguments, use_reentrant=False) if recompute else chunk(*arguments))
    return head.join(parts)


def _logprobs_and_entropies(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [n] of target i64[n] and entropies [n] of logits [n, V], both with a gradient."""
    logp = logits.log_softmax(dim=-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp.clamp(min=-1e4)).sum(dim=-1)


class _PickLogprobs(torch.autograd.Function):
    """Map logits [n, V], target i64[n] and temperature f32[n] to log-probabilities [n] and entropies [n].

    Overwrites the logits, which nothing else may use. The distribution is kept for the backward pass, which overwrites
    it.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        index = target[:, None]
        logits.div_(temperature[:, None])
        cut = truncate(logits, sampling, keep=target)
        if cut is not logits:
            logits = cut.clamp_(min=torch.finfo(cut.dtype).min)  # -inf * 0 is NaN
        logp = logits.log_softmax(dim=-1)
        logprobs = logp.gather(1, index)
        norm = logits.gather(1, index) - logprobs
        p = logp.exp_()
        entropy = norm[:, 0] - logits.mul_(p).sum(dim=-1)
        ctx.save_for_backward(p, index, temperature)
        ctx.mark_non_differentiable(entropy)
        return logprobs[:, 0], entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        p, index, temperature = ctx.saved_tensors
        scaled = (grad / temperature).to(p.dtype)[:, None]
        return p.mul_(-scaled).scatter_add_(1, index, scaled), None, None, None
