"""A checker of any token loss for the invariants of `credit.invariants.INVARIANTS`.

    broken = check_loss(my_loss, {"clip": 0.2})
    assert not broken, broken

Each kind declares which invariants do not hold, and the reason (`credit.invariants.declare`).
Invariants 5 and 6 are about rewards, which a loss never sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turnstile.batching.batch import PER_TOKEN, Batch
from turnstile.credit.invariants import DoesNotApply, Finding, broken, declarations, examine, format_change
from turnstile.losses.base import Metrics, Scope, TokenLoss, needs_of

DECLARED = declarations("loss")
LOSS_MULTIPLIERS = declarations("loss_multiplier")
"""The declarations of losses, and of loss multipliers, which are checked with a loss that keeps all invariants."""


_CUTS: Mapping[Scope, tuple[int, ...]] = {"": (3, 9, 12), "trajectory": (6, 18), "group": (12,), "step": (3, 12, 18)}
"""The tokens at which the sample batch is split in two, by scope. A loss of scope "step" is split and must say so."""


def check_loss(loss: TokenLoss, knobs: Mapping[str, Any] | None = None, *, seed: int = 0) -> dict[int, str]:
    """Return the invariants that a token loss breaks: number -> a counterexample. Empty if all hold."""
    return broken(examine_loss(functools.partial(loss, **dict(knobs or {})), seed=seed))


def examine_loss(loss: Callable[..., tuple[Tensor, Metrics]], *, seed: int = 0) -> dict[int, Finding]:
    """Return the finding for each invariant of a token loss whose knobs are bound.

    The batch has 24 tokens and the extras that built-in losses read. One token has weight 0, and its old and new
    log-probabilities are very far apart. The unit that must be in one batch according to `losses.base.needs` is never
    split: a trajectory of six tokens or a group of two trajectories. A turn of three tokens is never split either.
    Raises AssertionError unless the plain batch gives one value per token, finite wherever the weight is not 0, and
    detached metrics.
    """
    batch, logprobs = sample_batch(seed=seed)

    def run(logprobs: Tensor, batch: Batch) -> Tensor:
        values, metrics = loss(logprobs, batch)
        for name, values_of in (("loss", values), *metrics.items()):
            if values_of.shape != logprobs.shape:
                raise AssertionError(f"{name} is {tuple(values_of.shape)}, not one value for each of {len(logprobs)}")
        if any(metric.requires_grad for metric in metrics.values()):
            raise AssertionError("metrics must be detached")
        return values

    plain = run(logprobs, batch)
    odd = (~torch.isfinite(plain) & (batch.weights != 0)).nonzero()
    if len(odd):
        raise AssertionError(f"the loss of token {int(odd[0])} is {float(plain[odd[0]])}, of finite log-probabilities")
    scope = needs_of(loss).scope
    return examine(
        {
            1: [
                lambda: _describe_difference(
                    "behind three more masked tokens", plain, run(logprobs, with_masked(batch))
                )
            ],
            2: [lambda: _permutation(run, logprobs, batch, seed)],
            3: [functools.partial(_splitting, run, logprobs, batch, begin) for begin in _CUTS[scope]],
            4: [lambda: _masked(run, logprobs, batch)],
            5: [_sees_no_rewards],
            6: [_sees_no_rewards],
            7: [lambda: _no_advantage(run, logprobs, batch)],
        }
    )


Run = Callable[[Tensor, Batch], Tensor]


def _permutation(run: Run, logprobs: Tensor, batch: Batch, seed: int) -> str | None:
    order = torch.randperm(len(logprobs), generator=torch.Generator().manual_seed(seed))
    moved = run(logprobs[order], select(batch, order))
    return _describe_difference(
        "with the tokens in another order", run(logprobs, batch), moved[torch.argsort(order)], rtol=1e-12
    )


def _splitting(run: Run, logprobs: Tensor, batch: Batch, begin: int) -> str | None:
    halves = torch.arange(0, begin), torch.arange(begin, len(logprobs))
    apart = torch.cat([run(logprobs[half], select(batch, half)) for half in halves])
    return _describe_difference(
        f"with tokens 0 to {begin - 1} in a batch of their own", run(logprobs, batch), apart, rtol=1e-12
    )


def _masked(run: Run, logprobs: Tensor, batch: Batch) -> str | None:
    slopes = _gradient(run, logprobs, batch)[1]
    masked = slopes[:, batch.weights == 0]
    if masked.any():
        return f"a token of weight 0 has the gradient {float(masked[masked != 0][0]):.3g}"
    if not torch.isfinite(slopes).all():
        return f"beside a token of weight 0, a gradient is {float(slopes[~torch.isfinite(slopes)][0])}"
    return None


def _no_advantage(run: Run, logprobs: Tensor, batch: Batch) -> str | None:
    flat = replace(batch, advantages=torch.zeros_like(batch.advantages))
    for name, found in zip(("loss", "gradient"), _gradient(run, logprobs, flat), strict=True):
        if found.any():
            return f"where every advantage is 0, a token has the {name} {float(found[found != 0][0]):.3g}"
    return None


def _sees_no_rewards() -> str | None:
    raise DoesNotApply("a loss sees advantages, no rewards")


def _describe_difference(what: str, expected: Tensor, actual: Tensor, *, rtol: float = 0.0) -> str | None:
    if torch.allclose(expected, actual, rtol=rtol, atol=0):
        return None
    n = int((expected - actual).abs().nan_to_num(nan=torch.inf).argmax())
    return f"{what}, the loss of token {n} {format_change(float(expected[n]), float(actual[n]))}"


def _gradient(run: Run, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss [N], and the gradients of its weighted sum with respect to log-probability and entropy [2, N]."""
    leaf = logprobs.clone().requires_grad_()
    entropy = batch.extras["entropy"].clone().requires_grad_()
    loss = run(leaf, replace(batch, extras={**batch.extras, "entropy": entropy}))
    leaves = (leaf, entropy)
    if not loss.requires_grad:
        return loss, torch.zeros(2, len(leaf), dtype=leaf.dtype)
    found = torch.autograd.grad((loss * batch.weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.stack(found)


def sample_batch(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor]:
    """Return a batch of 24 trained tokens, and the policy's log-probabilities [24] of type `dtype`.

    There are two groups of two trajectories. Each trajectory is a row of eight tokens; six of them are trained, in two
    turns.
    """
    generator = torch.Generator().manual_seed(seed)
    n = 24
    behaviour = -2 * torch.rand(n, generator=generator, dtype=dtype)
    logprobs = (behaviour + 0.4 * torch.randn(n, generator=generator, dtype=dtype)).clamp(max=-1e-3)
    weights = torch.full((n,), 1 / n, dtype=dtype)
    weights[3] = 0.0
    behaviour[3], logprobs[3] = -800.0, -0.001
    row = torch.arange(n) // 6
    slots = torch.arange(32)
    near = {
        name: behaviour + 0.2 * torch.randn(n, generator=generator, dtype=dtype)
        for name in ("ref_logprobs", "proximal_logprobs", "teacher_logprobs", "feedback_logprobs", "values", "returns")
    }
    batch = Batch(
        tokens=slots,
        positions=slots % 8,
        subtree_end=slots // 8 * 8 + 8,
        trees=((0, 8), (8, 16), (16, 24), (24, 32)),
        source=torch.arange(n) % 6 + 8 * row + 1,
        target=torch.arange(n) % 6 + 8 * row + 2,
        row=row,
        turn=torch.arange(n) % 6 // 3,
        trajectory=row,
        group=row // 2,
        attempt=row % 2,
        logprobs=behaviour,
        advantages=torch.randn(n, generator=generator, dtype=dtype),
        weights=weights,
        temperature=torch.ones(n, dtype=dtype),
        versions=torch.zeros(n, dtype=torch.int64),
        extras={
            **near,
            "entropy": 2 * torch.rand(n, generator=generator, dtype=dtype),
            "entropy_past": torch.ones(n, dtype=dtype),
        },
    )
    return batch, logprobs


def with_masked(batch: Batch) -> Batch:
    """Return the batch of `sample_batch` with three more masked tokens at the start of its first row."""
    more = torch.arange(3)
    return replace(
        batch,
        tokens=torch.cat([more, batch.tokens]),
        positions=torch.cat([more, batch.positions[:8] + 3, batch.positions[8:]]),
        subtree_end=torch.cat([torch.full((3,), 11), batch.subtree_end + 3]),
        trees=((0, 11), *((begin + 3, end + 3) for begin, end in batch.trees[1:])),
        source=batch.source + 3,
    )


def select(batch: Batch, index: Tensor) -> Batch:
    """Return the batch with only the trained tokens at `index`, in that order."""
    return replace(
        batch,
        **{name: getattr(batch, name)[index] for name in ("source", *PER_TOKEN)},
        extras={name: values[index] for name, values in batch.extras.items()},
    )
