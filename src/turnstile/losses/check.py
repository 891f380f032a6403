"""A checker that any token loss can be put through, for the invariants of `credit.check.INVARIANTS`.

    broken = check_loss(my_loss, {"clip": 0.2})
    assert not broken, broken

`DECLARED` and `FACTORS` say for each built-in kind which invariants do not hold, and why they cannot. Invariants 5
and 6 speak of rewards and turns, which a loss never sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turnstile.batching.batch import PER_TOKEN, Batch
from turnstile.credit.check import Declaration
from turnstile.losses.base import Metrics, TokenLoss, Whole, needs_of

_NO_REWARD = {7: "it does not depend on rewards"}
_STEP = {3: "chosen over all tokens of a step: the trainer gives it them in one batch"}

DECLARED: tuple[Declaration, ...] = (
    Declaration(kind="ppo"),
    Declaration(kind="ppo", knobs={"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0}),
    Declaration(kind="reinforce"),
    Declaration(kind="sft"),
    *(Declaration(kind="kl", knobs={"estimator": estimator}, exempt=_NO_REWARD) for estimator in ("k1", "k2", "k3")),
    Declaration(kind="decoupled_ppo"),
    Declaration(kind="decoupled_ppo", knobs={"cap": 1.1}),
    Declaration(kind="gspo"),
    Declaration(kind="gspo", knobs={"unit": "turn", "clip_low": 0.1, "clip_high": 0.1}),
    Declaration(kind="gmpo"),
    Declaration(kind="gmpo", knobs={"unit": "turn", "clip_low": 0.1, "clip_high": 0.1}),
    Declaration(kind="cispo"),
    Declaration(kind="clip_cov", knobs={"share": 0.2, "low": 0.05}, exempt=_STEP),
    Declaration(kind="kl_cov", knobs={"share": 0.2}, exempt=_STEP),
    Declaration(kind="entropy", exempt=_NO_REWARD),
    Declaration(kind="entropy_band", exempt=_NO_REWARD),
    Declaration(kind="entropy_balanced_clip"),
    Declaration(kind="entropy_balanced_clip", knobs={"clip_low": 0.1, "clip_high": 0.1, "keep": "both"}),
    Declaration(kind="forward_kl", exempt=_NO_REWARD),
    Declaration(kind="forward_kl", knobs={"estimator": "k1"}, exempt=_NO_REWARD),
    Declaration(kind="distill", exempt=_NO_REWARD),
    Declaration(kind="self_distill", exempt=_NO_REWARD),
    Declaration(kind="value", exempt=_NO_REWARD),
    Declaration(kind="dpo"),
    Declaration(kind="refuel"),
    Declaration(kind="refuel", knobs={"turns": "all"}),
    Declaration(kind="pacs"),
)

FACTORS: tuple[Declaration, ...] = (
    Declaration(kind="tis", knobs={"cap": 1.1}),
    Declaration(kind="tis", knobs={"unit": "turn"}),
    Declaration(kind="mis", knobs={"cap": 1.1}),
    Declaration(kind="mis", knobs={"unit": "turn", "mean": True}),
    Declaration(kind="icepop", knobs={"low": 0.9, "high": 1.2}),
    Declaration(kind="high_entropy_only", exempt=_STEP),
)
"""The same for factors, each of them with any loss that keeps the invariants by itself."""


_CUTS: Mapping[Whole, tuple[int, ...]] = {"": (3, 9, 12), "trajectory": (6, 18), "group": (12,), "step": (3, 12, 18)}
"""Where the sample may be cut in two by what a loss needs whole. A turn never is; a step must not be, and is."""


def check_loss(loss: TokenLoss, knobs: Mapping[str, Any] | None = None, *, seed: int = 0) -> dict[int, str]:
    """The invariants 1, 2, 3, 4 and 7 that a token loss breaks: number -> what was seen. Empty when all hold.

    The batch has 24 tokens, one of which has weight 0 and log-probabilities as far apart as they get, and the
    extras that built-in losses read. What the loss needs in one batch (`losses.base.needs`) is never cut: not a
    trajectory of six tokens, not a group of two, nor ever a turn of three.
    """
    batch, logprobs = sample_batch(seed=seed)
    bound: Callable[..., tuple[Tensor, Metrics]] = functools.partial(loss, **dict(knobs or {}))

    def run(logprobs: Tensor, batch: Batch) -> Tensor:
        values, metrics = bound(logprobs, batch)
        for name, values_of in (("loss", values), *metrics.items()):
            if values_of.shape != logprobs.shape:
                raise AssertionError(f"{name} is {tuple(values_of.shape)}, not one value for each of {len(logprobs)}")
        if any(metric.requires_grad for metric in metrics.values()):
            raise AssertionError("metrics must be detached")
        return values

    broken: dict[int, str] = {}
    plain = run(logprobs, batch)
    if not torch.equal(plain, run(logprobs, with_masked(batch))):
        broken[1] = "the loss of a token depends on where it lies among masked tokens"
    order = torch.randperm(len(logprobs), generator=torch.Generator().manual_seed(seed))
    if not torch.allclose(plain[order], run(logprobs[order], select(batch, order)), rtol=1e-12, atol=0):
        broken[2] = "the loss depends on the order of tokens"
    for begin in _CUTS[needs_of(bound).whole]:
        halves = torch.arange(0, begin), torch.arange(begin, len(logprobs))
        apart = torch.cat([run(logprobs[half], select(batch, half)) for half in halves])
        if not torch.allclose(plain, apart, rtol=1e-12, atol=0):
            broken[3] = "the loss of a token depends on which others are in its micro-batch"
    slopes = _gradient(run, logprobs, batch)[1]
    if slopes[:, batch.weights == 0].any() or not torch.isfinite(slopes).all():
        broken[4] = "a token of weight 0 got a gradient"
    flat = replace(batch, advantages=torch.zeros_like(batch.advantages))
    if any(found.any() for found in _gradient(run, logprobs, flat)):
        broken[7] = "a zero advantage gave a loss or a gradient"
    return broken


def _gradient(run: Callable[[Tensor, Batch], Tensor], logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss [N], and the gradient of a step by log-probability and by entropy [2, N]."""
    leaf = logprobs.clone().requires_grad_()
    entropy = batch.extras["entropy"].clone().requires_grad_()
    loss = run(leaf, replace(batch, extras={**batch.extras, "entropy": entropy}))
    leaves = (leaf, entropy)
    if not loss.requires_grad:
        return loss, torch.zeros(2, len(leaf), dtype=leaf.dtype)
    found = torch.autograd.grad((loss * batch.weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.stack(found)


def sample_batch(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor]:
    """A batch of 24 trained tokens, and log-probabilities of the policy, f64[24].

    Two groups of two trajectories, each a row of eight tokens, six of them trained, in two turns.
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
    """The batch of `sample_batch` with three more masked tokens at the head of its first row."""
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
    """The batch with only these trained tokens, in this order."""
    return replace(
        batch,
        **{name: getattr(batch, name)[index] for name in ("source", *PER_TOKEN)},
        extras={name: values[index] for name, values in batch.extras.items()},
    )
