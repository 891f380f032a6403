"""Batches of a few tokens whose losses one computes by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turnstile.batching.batch import PER_TOKEN, Batch
from turnstile.losses.check import sample_batch, select


def batch(
    ratios: list[float], advantages: list[float], extras: dict[str, list[float]] | None = None, **fields: list[float]
) -> tuple[Batch, Tensor]:
    """Tokens at log-probability -1 whose sampling policy gave them -1 - log ratio. One row of one turn, unless
    `fields` says otherwise."""
    count = len(ratios)
    whole, _ = sample_batch()
    given = select(whole, torch.zeros(count, dtype=torch.int64))
    logprobs = torch.full((count,), -1.0, dtype=torch.float64)
    changes: dict[str, Any] = {
        "logprobs": logprobs - torch.tensor(ratios, dtype=torch.float64).log(),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "extras": {name: torch.tensor(values, dtype=torch.float64) for name, values in (extras or {}).items()},
    }
    for name, values in fields.items():
        assert name in PER_TOKEN
        changes[name] = torch.tensor(values, dtype=getattr(given, name).dtype)
    return replace(given, **changes), logprobs.requires_grad_()


def gradient(loss: Tensor, by: Tensor) -> list[float]:
    found: list[float] = torch.autograd.grad(loss.sum(), by, retain_graph=True)[0].tolist()
    return found
