"""Faulty losses that the checker must catch; those of the tables go through it in conform."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from turnstile.credit.invariants import Declaration
from turnstile.lookup import KINDS, resolve
from turnstile.losses.check import DECLARED, LOSS_MULTIPLIERS, check_loss
from turnstile.losses.gspo import gspo
from turnstile.losses.multipliers import with_multipliers
from turnstile.losses.ppo import ppo


def test_every_kind_declares_itself() -> None:
    assert {declared.kind for declared in DECLARED} == set(KINDS["loss"])
    assert {declared.kind for declared in LOSS_MULTIPLIERS} == set(KINDS["loss_multiplier"])


@pytest.mark.parametrize("declared", LOSS_MULTIPLIERS, ids=lambda d: f"{d.kind}-{'-'.join(map(str, d.knobs.values()))}")
def test_invariants_of_factors_of_a_loss_of_whole_trajectories(declared: Declaration) -> None:
    factor = functools.partial(resolve("loss_multiplier", declared.kind), **declared.knobs)
    broken = check_loss(with_multipliers(gspo, [factor]))
    assert set(broken) == set(declared.exempt), broken


def _batch_mean(logprobs, batch):  # type: ignore[no-untyped-def]
    """Normalises over the tokens at hand."""
    return -(batch.advantages - batch.advantages.mean()) * logprobs, {}


def _unbounded(logprobs, batch):  # type: ignore[no-untyped-def]
    return -torch.exp(logprobs - batch.logprobs) * batch.advantages, {}


def _positional(logprobs, batch):  # type: ignore[no-untyped-def]
    return -batch.advantages * logprobs * batch.positions[batch.source], {}


def _ordered(logprobs, batch):  # type: ignore[no-untyped-def]
    return -batch.advantages * logprobs * torch.arange(len(logprobs)), {}


def _rewarded_anyway(logprobs, batch):  # type: ignore[no-untyped-def]
    return ppo(logprobs, replace(batch, advantages=batch.advantages + 0.1))


def _silent(logprobs, batch):  # type: ignore[no-untyped-def]
    """Needs whole trajectories, and does not say so."""
    return gspo(logprobs, batch)


@pytest.mark.parametrize(
    ("loss", "caught"),
    [(_batch_mean, 3), (_silent, 3), (_unbounded, 4), (_positional, 1), (_ordered, 2), (_rewarded_anyway, 7)],
)
def test_the_checker_catches_faults(loss: Callable[..., Any], caught: int) -> None:
    assert caught in check_loss(loss)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logprobs, batch: (logprobs.mean(), {}), "one value for each"),
        (lambda logprobs, batch: (-logprobs, {"m": logprobs}), "detached"),
    ],
)
def test_the_checker_wants_one_value_a_token_and_detached_metrics(loss: Any, message: str) -> None:
    def with_grad(logprobs, batch):  # type: ignore[no-untyped-def]
        return loss(logprobs.clone().requires_grad_(), batch)

    with pytest.raises(AssertionError, match=message):
        check_loss(with_grad)


@pytest.mark.parametrize(
    ("loss", "number", "seen"),
    [
        (_ordered, 2, r"with the tokens in another order, the loss of token \d+ goes from \S+ to \S+$"),
        (_silent, 3, r"with tokens 0 to 2 in a batch of their own, the loss of token \d+ goes from \S+ to \S+$"),
        (_unbounded, 4, "a token of weight 0 has the gradient (nan|-?inf)"),
        (_rewarded_anyway, 7, "where every advantage is 0, a token has the loss"),
    ],
)
def test_what_is_broken_has_a_counterexample(loss: Callable[..., Any], number: int, seen: str) -> None:
    assert re.search(seen, check_loss(loss)[number])
