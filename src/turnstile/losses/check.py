"""A checker that any token loss can be put through, for the invariants of `credit.check.INVARIANTS`.

    broken = check_loss(my_loss, {"clip": 0.2})
    assert not broken, broken

`DECLARED` says for each built-in kind which invariants do not hold, and why they cannot. Invariants 5 and 6
speak of rewards and turns, which a loss never sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.check import Declaration
from turnstile.losses.base import TokenLoss

DECLARED: tuple[Declaration, ...] = (
    Declaration(kind="ppo"),
    Declaration(kind="ppo", knobs={"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0}),
    Declaration(kind="reinforce"),
    Declaration(kind="sft"),
    *(
        Declaration(
            kind="kl",
            knobs={"estimator": estimator},
            exempt={7: "the distance to the reference policy does not depend on rewards"},
        )
        for estimator in ("k1", "k2", "k3")
    ),
)


def check_loss(loss: TokenLoss, knobs: Mapping[str, Any] | None = None, *, seed: int = 0) -> dict[int, str]:
    """The invariants 1, 2, 3, 4 and 7 that a token loss breaks: number -> what was seen. Empty when all hold.

    The batch has twelve tokens, one of which has weight 0 and log-probabilities as far apart as they get, and
    the extras that built-in losses read.
    """
    batch, logprobs = sample_batch(seed=seed)
    given = dict(knobs or {})

    def run(logprobs: Tensor, batch: Batch) -> Tensor:
        values, metrics = loss(logprobs, batch, **given)
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
    halves = [torch.arange(0, 5), torch.arange(5, len(logprobs))]
    apart = torch.cat([run(logprobs[half], select(batch, half)) for half in halves])
    if not torch.allclose(plain, apart, rtol=1e-12, atol=0):
        broken[3] = "the loss of a token depends on which others are in its micro-batch"
    leaf = logprobs.clone().requires_grad_()
    (run(leaf, batch) * batch.weights).sum().backward()
    assert leaf.grad is not None
    if leaf.grad[batch.weights == 0].any() or not torch.isfinite(leaf.grad).all():
        broken[4] = "a token of weight 0 got a gradient"
    leaf = logprobs.clone().requires_grad_()
    flat = run(leaf, replace(batch, advantages=torch.zeros_like(batch.advantages)))
    flat.sum().backward()
    assert leaf.grad is not None
    if flat.any() or leaf.grad.any():
        broken[7] = "a zero advantage gave a loss or a gradient"
    return broken


def sample_batch(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor]:
    """A batch of twelve trained tokens in two rows of eight, and log-probabilities of the policy, f64[12]."""
    generator = torch.Generator().manual_seed(seed)
    n = 12
    behaviour = -2 * torch.rand(n, generator=generator, dtype=dtype)
    logprobs = (behaviour + 0.4 * torch.randn(n, generator=generator, dtype=dtype)).clamp(max=-1e-3)
    weights = torch.full((n,), 1 / n, dtype=dtype)
    weights[3] = 0.0
    behaviour[3], logprobs[3] = -800.0, -0.001
    row = torch.arange(n) // 6
    batch = Batch(
        tokens=torch.arange(16),
        positions=torch.arange(16) % 8,
        subtree_end=torch.tensor([8] * 8 + [16] * 8),
        trees=((0, 8), (8, 16)),
        source=torch.arange(n) % 6 + 8 * row + 1,
        target=torch.arange(n) % 6 + 8 * row + 2,
        row=row,
        turn=torch.arange(n) % 6 // 3,
        trajectory=row,
        logprobs=behaviour,
        advantages=torch.randn(n, generator=generator, dtype=dtype),
        weights=weights,
        temperature=torch.ones(n, dtype=dtype),
        versions=torch.zeros(n, dtype=torch.int64),
        extras={
            name: behaviour + 0.2 * torch.randn(n, generator=generator, dtype=dtype)
            for name in ("ref_logprobs", "proximal_logprobs", "teacher_logprobs")
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
        trees=((0, 11), (11, 19)),
        source=batch.source + 3,
    )


def select(batch: Batch, index: Tensor) -> Batch:
    """The batch with only these trained tokens, in this order."""
    names = ("source", "target", "row", "turn", "trajectory", "logprobs", "advantages", "weights", "temperature")
    return replace(
        batch,
        **{name: getattr(batch, name)[index] for name in (*names, "versions")},
        extras={name: values[index] for name, values in batch.extras.items()},
    )
