"""From hidden states to the log-probabilities of tokens, the same way in the sampler and the trainer.

The vocabulary projection runs only where a token is wanted, in chunks, so [T, V] never exists.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from turnstile.types import Sampling

CHUNK_ELEMENTS = 2**24
"""Logits held at once, in elements: 64 MiB in float32."""


def project(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [N, V] of last hidden states [N, H], in at least float32, with the family's own scaling."""
    head = model.get_output_embeddings()
    logits: Tensor = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)
    if scale is not None:  # Cohere
        logits = logits * scale
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:  # Granite
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:  # Gemma 2
        logits = torch.tanh(logits / cap) * cap
    return logits


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

    `temperature` f32[N] is that of each token's sampling; the truncation of `sampling` is applied too. The
    entropies carry a gradient only where it is asked for: it holds [N, V] once more.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    size = max(1, CHUNK_ELEMENTS // int(vocabulary))

    def chunk(h: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        logits = truncate(project(model, h) / t[:, None], sampling, keep=y)
        norm = logits.logsumexp(dim=-1)
        logprobs = logits.gather(1, y[:, None])[:, 0] - norm
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            logp = logits - norm[:, None]
            entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(dim=-1)
        return logprobs, entropy

    several = len(target) > 4 * size  # then logits are computed again in the backward pass, not kept
    parts = []
    for begin in range(0, len(target), size):
        part = slice(begin, begin + size)
        arguments = (hidden[part], target[part], temperature[part])
        again = several and torch.is_grad_enabled()
        parts.append(checkpoint(chunk, *arguments, use_reentrant=False) if again else chunk(*arguments))
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
