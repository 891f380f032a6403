"""From logits to tokens: drawn by numbers that depend on the request and the token's index alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from turnstile.engines.local.cpu import compiled
from turnstile.models.logprobs import truncate
from turnstile.types import Sampling

STRETCH = 256
"""Tokens whose probabilities are added up first, to find where in the vocabulary a draw falls."""


def plain(sampling: Sampling) -> Sampling:
    """What decides the distribution: requests that agree on it are drawn together."""
    return Sampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, index) alone."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def draw(
    logits: Tensor, rows: Tensor, sampling: Sampling, draws: Sequence[float], allowed: Tensor | None = None
) -> list[tuple[int, float, float]]:
    """(token, log-probability, entropy) for each draw, out of row `rows[i]` of logits [R, V], by inversion.

    Where `allowed` bool[n, V] is given nothing else is drawn; log-probabilities and entropies do not heed it. Raises
    FloatingPointError where logits are not finite.
    """
    if sampling.temperature == 0:
        best = logits[rows] if allowed is None else logits[rows].masked_fill(~allowed, float("-inf"))
        most, tokens = best.max(dim=-1)
        _check_finite(most)
        return [(int(token), 0.0, 0.0) for token in tokens.tolist()]
    whole = allowed is None and sampling.top_p == 1 and not sampling.top_k and not sampling.min_p
    if whole and compiled.can_compute(logits):
        found = compiled.draw(logits, rows.tolist(), draws, sampling.temperature)
        _check_finite(torch.tensor([entropy for _, _, entropy in found]))
        return found
    scaled = logits if sampling.temperature == 1 else logits / sampling.temperature
    cut = truncate(scaled, sampling)
    p = cut.softmax(dim=-1)
    norm, entropy = _norm_and_entropy(p, cut)
    if allowed is None:
        tokens = _invert(p, rows, draws)
    else:
        left = cut[rows].masked_fill(~allowed, float("-inf")).softmax(dim=-1)
        tokens = _invert(left, torch.arange(len(rows), device=rows.device), draws)
    logprobs = (cut[rows, tokens] - norm[rows]).clamp_(max=0)  # also of what is allowed alone, and hardly likely
    drawn = torch.stack(
        [tokens.double(), logprobs.double(), entropy[rows].double()]
    ).tolist()  # a GPU is waited for once
    return [(int(token), logprob, spread) for token, logprob, spread in zip(*drawn, strict=True)]


def _norm_and_entropy(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithms of the sums [R] behind softmaxes p [R, V] of logits, and their entropies [R] in nats, by few walks
    over the vocabulary."""
    best, where = logits.max(dim=-1, keepdim=True)
    norm = (best - p.gather(1, where).log())[:, 0]
    mean = torch.bmm(p[:, None], logits[..., None])[:, 0, 0]
    if not bool(mean.isfinite().all()):  # what is excluded counts nothing, and not NaN
        mean = torch.linalg.vecdot(p, logits.clamp(min=torch.finfo(logits.dtype).min))
    return norm, (norm - mean).clamp_(min=0)


def _invert(p: Tensor, rows: Tensor, draws: Sequence[float]) -> Tensor:
    """The tokens i64[n] at which the mass of rows `rows[i]` of p [R, V] reaches `draws[i]` of the whole."""
    width = p.shape[1]
    short = -width % STRETCH
    whole = torch.nn.functional.pad(p, (0, short)) if short else p
    stretches = whole.view(len(p), -1, STRETCH)
    before = stretches.sum(dim=-1).cumsum(dim=-1)[rows]
    total = before[:, -1]
    _check_finite(total)
    target = torch.tensor(draws, dtype=p.dtype, device=p.device) * total
    target = target.minimum(total.nextafter(torch.zeros_like(total)))  # a draw may round up to 1: no token is there
    place = torch.searchsorted(before, target[:, None], right=True)
    own = stretches[rows, place[:, 0]]
    rest = target[:, None] - (before.gather(1, place) - own.sum(dim=-1, keepdim=True))
    inside = own.cumsum(dim=-1)
    rest = rest.clamp(min=0).minimum(inside[:, -1:].nextafter(torch.zeros_like(rest)))
    return (place * STRETCH + torch.searchsorted(inside, rest, right=True))[:, 0]


def _check_finite(values: Tensor) -> None:
    """Raises FloatingPointError for logits of which something that all of them count in is not finite."""
    if not bool(values.isfinite().all()):
        raise FloatingPointError("the model gave logits that are not finite")
