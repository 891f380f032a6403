"""The optimiser, and learning-rate schedules, which are multipliers of the recipe's learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

Schedule = Callable[[float], float]
"""Progress in [0, 1) after warm-up -> learning-rate multiplier."""


def constant(progress: float) -> float:
    """Return 1 at every step."""
    return 1.0


def linear(progress: float) -> float:
    """Return a multiplier that falls linearly from 1 to 0.1."""
    return 1.0 - 0.9 * progress


def cosine(progress: float) -> float:
    """Return a multiplier that falls from 1 to 0.1 along half a cosine."""
    return 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress))


def lr_multiplier(schedule: Schedule, step: int, warmup: int, total: int) -> float:
    """Return the learning-rate multiplier of optimiser step `step` (counted from 0) of `total`.

    It rises linearly over the first `warmup` steps. Without warm-up, Adam's first step has full size whatever the
    gradient is.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return schedule(min(1.0, (step - warmup) / max(1, total - warmup)))


def adamw(
    parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Return AdamW, fused if torch has a fused kernel for the device.

    The fused kernel makes one pass over weights, gradients and moments. The fallback allocates temporary copies of the
    network's size.
    """
    trained = list(parameters)
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in trained)
    implementation = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(trained, lr=lr, betas=betas, weight_decay=weight_decay, **implementation)
