"""Learning rates over time, as factors of the recipe's rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

Schedule = Callable[[float], float]
"""Progress in [0, 1) after warm-up -> factor."""


def constant(progress: float) -> float:
    """Return 1 throughout."""
    return 1.0


def linear(progress: float) -> float:
    """From 1 down to 0.1."""
    return 1.0 - 0.9 * progress


def cosine(progress: float) -> float:
    """From 1 down to 0.1 along half a cosine."""
    return 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress))


def factor(schedule: Schedule, step: int, warmup: int, total: int) -> float:
    """The factor of optimiser step `step` (from 0) of `total`, the first `warmup` of them rising linearly.

    Without warm-up, Adam's first step has full size whatever the gradient is.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return schedule(min(1.0, (step - warmup) / max(1, total - warmup)))


def adamw(
    parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW, in one pass over weights, gradients and moments where torch has a kernel for it; elsewhere each operation
    of its formula makes another copy of the network."""
    chosen = list(parameters)
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in chosen)
    how = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(chosen, lr=lr, betas=betas, weight_decay=weight_decay, **how)
