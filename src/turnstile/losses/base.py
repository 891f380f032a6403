"""The interfaces of token losses and loss multipliers, and the declaration of what they need from a batch.

A loss returns one value for each of the N trained tokens. The weights of tokens are fixed before packing
(`Batch.weights`), so a loss need not apply them. A loss multiplier returns one factor per token, by which a loss is
multiplied: an off-policy correction, or a selection of tokens.

In addition to the fields of every batch, `batch.extras["entropy"]` f32[N] is the policy's entropy at each token, in
nats.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, TypeVar, cast

from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError
from turnstile.lookup import Part

Metrics = dict[str, Tensor]
"""Diagnostics f32[N] of each token (detached); the trainer averages them over the step with the tokens' weights."""


TokenLoss = Callable[Concatenate[Tensor, Batch, ...], tuple[Tensor, Metrics]]
"""(logprobs f32[N], batch, **knobs) -> (loss f32[N], metrics). A loss is minimised."""

LossMultiplier = Callable[Concatenate[Batch, ...], tuple[Tensor, Metrics]]
"""(batch, **knobs) -> (multiplier f32[N], without a gradient, metrics)."""

NO_REWARD = {7: "it does not depend on rewards"}
CHOSEN = {3: "chosen over all tokens of a step: the trainer gives it them in one batch"}
"""Invariants that several losses declare broken (`credit.invariants.at`), with the reasons."""

Scope = Literal["", "trajectory", "group", "step"]
SCOPES: tuple[Scope, ...] = ("", "trajectory", "group", "step")
"""The units that must lie in one batch, from smallest to largest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """The requirements of a loss or loss multiplier.

    `extras` names arrays of `batch.extras` that not every batch has. `scope` is the unit that must not be split across
    batches, because a token's value depends on the unit's other tokens. With `entropy_gradient`, the entropy carries
    its gradient, which costs memory.
    """

    extras: tuple[str, ...] = ()
    scope: Scope = ""
    entropy_gradient: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            extras=tuple(dict.fromkeys((*self.extras, *other.extras))),
            scope=max(self.scope, other.scope, key=SCOPES.index),
            entropy_gradient=self.entropy_gradient or other.entropy_gradient,
        )


_Function = TypeVar("_Function", bound=Callable[..., Any])


def needs(
    *extras: str,
    scope: Scope | Literal["unit"] = "",
    entropy_gradient: bool = False,
    provider: Part | None = None,
) -> Callable[[_Function], _Function]:
    """Declare the needs of a loss or loss multiplier, which `needs_of` returns.

    `scope = "unit"` means "trajectory" if the function's knob `unit` is "trajectory", and no scope otherwise.
    `provider`, a `LogprobProvider` (trainer/reference.py), supplies those `extras` that no other part of a recipe
    supplies.
    """

    def mark(function: _Function) -> _Function:
        least: Scope = "" if scope == "unit" else scope
        cast(Any, function).needs = Needs(extras=extras, scope=least, entropy_gradient=entropy_gradient)
        cast(Any, function).by_unit = scope == "unit"
        cast(Any, function).part = provider
        return function

    return mark


def needs_of(function: Callable[..., Any]) -> Needs:
    """Return the declared needs of a loss or loss multiplier, whose knobs may be bound; none by default."""
    bound = function if isinstance(function, functools.partial) else functools.partial(function)
    declared = cast(Needs, getattr(bound.func, "needs", Needs()))
    if getattr(bound.func, "by_unit", False):
        unit = bound.keywords.get("unit", inspect.signature(bound.func).parameters["unit"].default)
        return declared | Needs(scope="trajectory" if unit == "trajectory" else "")
    return declared


def extra(batch: Batch, name: str, kind: str) -> Tensor:
    """Return the array `name` of the batch's extras.

    Raises ConfigError, which names the loss `kind`, if the batch lacks it.
    """
    if name not in batch.extras:
        available = ", ".join(sorted(batch.extras)) or "none"
        description = EXTRA_DESCRIPTIONS.get(name, name)
        raise ConfigError(f"loss {kind!r} needs {description}, but the batch has no extra {name!r} (has: {available})")
    return batch.extras[name]


EXTRA_DESCRIPTIONS = {
    "ref_logprobs": "the reference policy's log-probabilities",
    "proximal_logprobs": "the policy's log-probabilities before the step",
    "teacher_logprobs": "the teacher's log-probabilities",
    "feedback_logprobs": "the policy's log-probabilities given feedback",
    "entropy": "the policy's entropy at each token",
    "entropy_past": "the mean entropy of earlier steps",
    "values": "a critic's values before the step",
    "returns": "target returns of a critic",
}
"""Descriptions of extras for error messages."""
