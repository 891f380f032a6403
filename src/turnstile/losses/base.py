"""The objective: the shape of a token loss.

A loss works token by token on the N trained tokens and returns one value for each; how tokens are weighed
against each other was fixed before packing (`Batch.weights`), and is not a loss's business. A factor is a number
for each token that a loss is multiplied by: an off-policy correction, or which tokens learn at all.

Beside what every batch carries, `batch.extras["entropy"]` f32[N] is the policy's entropy at each token, in nats.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast

from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError
from turnstile.lookup import Part

Metrics = dict[str, Tensor]
"""Per-token diagnostics f32[N] (detached), averaged over the step with the tokens' weights by the trainer."""


class TokenLoss(Protocol):
    """(logprobs f32[N], batch, **knobs) -> (loss f32[N], metrics). A loss is minimised."""

    def __call__(self, logprobs: Tensor, batch: Batch, **knobs: Any) -> tuple[Tensor, Metrics]: ...


class LossMultiplier(Protocol):
    """(batch, **knobs) -> (factor f32[N], without a gradient, metrics)."""

    def __call__(self, batch: Batch, **knobs: Any) -> tuple[Tensor, Metrics]: ...


NO_REWARD = {7: "it does not depend on rewards"}
CHOSEN = {3: "chosen over all tokens of a step: the trainer gives it them in one batch"}
"""Invariants that cannot hold for several losses, and why: for `credit.invariants.at`."""

Whole = Literal["", "trajectory", "group", "step"]
SCOPES: tuple[Whole, ...] = ("", "trajectory", "group", "step")
"""From the least to the most that has to lie in one batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a loss or factor asks of whoever calls it.

    `extras` names arrays of `batch.extras` that not every batch has. `whole` says what must not be cut over several
    batches, because the value of a token depends on the others there. `entropy_gradient` asks that the entropy
    carries its gradient, which costs memory.
    """

    extras: tuple[str, ...] = ()
    whole: Whole = ""
    entropy_gradient: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            extras=tuple(dict.fromkeys((*self.extras, *other.extras))),
            whole=max(self.whole, other.whole, key=SCOPES.index),
            entropy_gradient=self.entropy_gradient or other.entropy_gradient,
        )


_Function = TypeVar("_Function", bound=Callable[..., Any])


def needs(
    *extras: str,
    whole: Whole | Literal["unit"] = "",
    entropy_gradient: bool = False,
    provider: Part | None = None,
) -> Callable[[_Function], _Function]:
    """Declare what a loss or factor needs; `needs_of` reads it. `whole = "unit"`: trajectories, where that is what its
    knob `unit` says. `provider`, a `LogprobProvider` (trainer/reference.py), gives those `extras` that no other part of
    a recipe gives."""

    def mark(function: _Function) -> _Function:
        least: Whole = "" if whole == "unit" else whole
        cast(Any, function).needs = Needs(extras=extras, whole=least, entropy_gradient=entropy_gradient)
        cast(Any, function).by_unit = whole == "unit"
        cast(Any, function).part = provider
        return function

    return mark


def needs_of(function: Callable[..., Any]) -> Needs:
    """What a loss or factor needs, also one whose knobs are bound; nothing where none is written on it."""
    bound = function if isinstance(function, functools.partial) else functools.partial(function)
    found = cast(Needs, getattr(bound.func, "needs", Needs()))
    if getattr(bound.func, "by_unit", False):
        unit = bound.keywords.get("unit", inspect.signature(bound.func).parameters["unit"].default)
        return found | Needs(whole="trajectory" if unit == "trajectory" else "")
    return found


def extra(batch: Batch, name: str, kind: str) -> Tensor:
    """An array that not every batch has, or a ConfigError that says which loss misses it."""
    if name not in batch.extras:
        have = ", ".join(sorted(batch.extras)) or "none"
        wanted = WHAT.get(name, name)
        raise ConfigError(f"loss {kind!r} needs {wanted}, but the batch has no extra {name!r} (extras: {have})")
    return batch.extras[name]


WHAT = {
    "ref_logprobs": "the reference policy's log-probabilities",
    "proximal_logprobs": "the log-probabilities before the step",
    "teacher_logprobs": "the teacher's log-probabilities",
    "feedback_logprobs": "the policy's log-probabilities given feedback",
    "entropy": "the policy's entropy at each token",
    "entropy_past": "the mean entropy of earlier steps",
    "values": "a critic's values before the step",
    "returns": "returns for a critic",
}
"""What extras are, for errors."""
