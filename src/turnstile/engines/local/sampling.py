"""Sample tokens from logits, with random numbers that depend only on the request's seed and the token's index."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from turnstile.engines.local.cpu import compiled
from turnstile.models.logprobs import truncate
from turnstile.types import Sampling

SEGMENT = 256
"""Tokens in a segment of the vocabulary. Segments are summed first, to find the one in which a draw falls."""


def distribution_of(sampling: Sampling) -> Sampling:
    """Return only the settings that decide the distribution. Requests for which they are equal are drawn together."""
    return Sampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) that depends on (seed, index) alone."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def draw(
    logits: Tensor, rows: Tensor, sampling: Sampling, draws: Sequence[float], allowed: Tensor | None = None
) -> list[tuple[int, float, float]]:
    """Draw a token from row `rows[i]` of logits [R, V] for each number `draws[i]` in [0, 1), by inversion.

    Returns (token, log-probability, entropy in nats) of each. With `allowed` bool[n, V] only those tokens are drawn;
    log-probabilities and entropies ignore it. Raises FloatingPointError if logits are not finite.
    """
    if sampling.temperature == 0:
        best = logits[rows] if allowed is None else logits[rows].masked_fill(~allowed, float("-inf"))
        highest, tokens = best.max(dim=-1)
        _check_finite(highest)
        return [(int(token), 0.0, 0.0) for token in tokens.tolist()]
    untruncated = allowed is None and sampling.top_p == 1 and not sampling.top_k and not sampling.min_p
    if untruncated and compiled.can_compute(logits):
        sampled = compiled.draw(logits, rows.tolist(), draws, sampling.temperature)
        _check_finite(torch.tensor([entropy for _, _, entropy in sampled]))
        return sampled
    scaled = logits if sampling.temperature == 1 else logits / sampling.temperature
    cut = truncate(scaled, sampling)
    p = cut.softmax(dim=-1)
    norm, entropy = _norm_and_entropy(p, cut)
    if allowed is None:
        tokens = _invert(p, rows, draws)
    else:
        left = cut[rows].masked_fill(~allowed, float("-inf")).softmax(dim=-1)
        tokens = _invert(left, torch.arange(len(rows), device=rows.device), draws)
    # Rounding can make these positive where only an unlikely token is allowed.
    logprobs = (cut[rows, tokens] - norm[rows]).clamp_(max=0)
    # One copy from a GPU, which waits for it, instead of three.
    drawn = torch.stack([tokens.double(), logprobs.double(), entropy[rows].double()]).tolist()
    return [(int(token), logprob, spread) for token, logprob, spread in zip(*drawn, strict=True)]


def _norm_and_entropy(p: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps [R] of logits [R, V] and the entropies [R] in nats of their softmaxes p [R, V].

    Makes few passes over the vocabulary.
    """
    best, where = logits.max(dim=-1, keepdim=True)
    norm = (best - p.gather(1, where).log())[:, 0]
    mean = torch.bmm(p[:, None], logits[..., None])[:, 0, 0]
    if not bool(mean.isfinite().all()):  # excluded tokens have p = 0, and 0 * -inf is NaN
        mean = torch.linalg.vecdot(p, logits.clamp(min=torch.finfo(logits.dtype).min))
    return norm, (norm - mean).clamp_(min=0)


def _invert(p: Tensor, rows: Tensor, draws: Sequence[float]) -> Tensor:
    """Return the tokens i64[n] at which the cumulative mass of p [R, V] in row `rows[i]` exceeds `draws[i]`.

    A draw is a fraction of the row's total. The mass is first summed by segments, and then within the segment in which
    the draw falls.
    """
    width = p.shape[1]
    padding = -width % SEGMENT
    padded = torch.nn.functional.pad(p, (0, padding)) if padding else p
    segments = padded.view(len(p), -1, SEGMENT)
    before = segments.sum(dim=-1).cumsum(dim=-1)[rows]
    total = before[:, -1]
    _check_finite(total)
    target = torch.tensor(draws, dtype=p.dtype, device=p.device) * total
    # A draw that rounds up to 1 must not pass the last token.
    target = target.minimum(total.nextafter(torch.zeros_like(total)))
    segment = torch.searchsorted(before, target[:, None], right=True)
    inside_segment = segments[rows, segment[:, 0]]
    rest = target[:, None] - (before.gather(1, segment) - inside_segment.sum(dim=-1, keepdim=True))
    cumulative = inside_segment.cumsum(dim=-1)
    rest = rest.clamp(min=0).minimum(cumulative[:, -1:].nextafter(torch.zeros_like(rest)))
    return (segment * SEGMENT + torch.searchsorted(cumulative, rest, right=True))[:, 0]


def _check_finite(values: Tensor) -> None:
    """Raise FloatingPointError if any of `values`, to each of which all logits of a row contribute, is not finite."""
    if not bool(values.isfinite().all()):
        raise FloatingPointError("the model returned logits that are not finite")
