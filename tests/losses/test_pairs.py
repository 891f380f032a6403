"""Losses of trajectories side by side: by hand, and against autograd through the pairs themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from tokens import batch, gradient
from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError
from turnstile.losses.check import sample_batch
from turnstile.losses.dpo import dpo
from turnstile.losses.pacs import pacs
from turnstile.losses.refuel import refuel


def two(advantages: list[float]) -> tuple[Batch, Tensor]:
    """Two trajectories of a group: two tokens with log pi - log reference = 1 and 2, and one with -1."""
    return batch(
        [1.5, 1.0, 0.5], advantages, {"ref_logprobs": [-2.0, -3.0, 0.0]}, trajectory=[0, 0, 1], group=[0, 0, 0]
    )


def test_dpo_by_hand() -> None:
    given, logprobs = two([1.0, 1.0, -1.0])
    loss, metrics = dpo(logprobs, given, beta=0.5)
    expected = -math.log(1 / (1 + math.exp(-2)))  # h = 3 and -1, times 0.5
    assert loss.tolist() == pytest.approx([expected] * 3)
    slope = 0.5 / (1 + math.exp(2))
    assert gradient(loss, logprobs) == pytest.approx([-slope, -slope, slope])
    assert metrics["margin"].tolist() == pytest.approx([2.0] * 3)
    assert metrics["accuracy"].tolist() == [1, 1, 1]
    assert metrics["kl_ref"].tolist() == [1, 2, -1]
    other, _ = two([-1.0, -1.0, 1.0])
    loss, metrics = dpo(logprobs, other, beta=0.5)
    assert loss.tolist() == pytest.approx([2 + expected] * 3)
    assert metrics["accuracy"].tolist() == [0, 0, 0]


def test_refuel_by_hand() -> None:
    given, logprobs = two([1.0, 1.0, -1.0])
    loss, metrics = refuel(logprobs, given, eta=0.5)
    off = (math.log(1.5) - math.log(0.5)) / 0.5 - 2
    assert loss.tolist() == pytest.approx([off**2] * 3)
    assert gradient(loss, logprobs) == pytest.approx([4 * off, 4 * off, -4 * off])
    assert metrics["residual"].tolist() == pytest.approx([abs(off)] * 3)


def test_refuel_looks_at_the_first_turn_unless_told_otherwise() -> None:
    given, logprobs = two([1.0, 7.0, -1.0])
    given = replace(given, turn=torch.tensor([2, 5, 0]))
    off = math.log(1.5) - math.log(0.5) - 2
    loss, _ = refuel(logprobs, given)
    assert gradient(loss, logprobs) == pytest.approx([2 * off, 0, -2 * off])
    off = math.log(1.5) - math.log(0.5) - 5
    assert gradient(refuel(logprobs, given, turns="all")[0], logprobs) == pytest.approx([2 * off, 2 * off, -2 * off])


def test_pacs_by_hand() -> None:
    given, logprobs = two([1.0, 1.0, -1.0])
    loss, metrics = pacs(logprobs, given, beta=0.5)
    low = math.log(1 + math.exp(-2))  # psi = 2 with label 1, and -2 with label 0
    assert loss.tolist() == pytest.approx([low] * 3)
    error = 1 / (1 + math.exp(2))
    assert gradient(loss, logprobs) == pytest.approx([-error, -error, error])  # 0.5 * (-error - error)
    assert metrics["score"].tolist() == pytest.approx([2, 2, -2])
    assert metrics["accuracy"].tolist() == [1, 1, 1]


def sums(given: Batch, leaf: Tensor, anchor: Tensor, first_turn: bool = False) -> dict[int, tuple[Tensor, float, int]]:
    """trajectory -> (sum of log-ratios, score, group), one by one."""
    found = {}
    for trajectory in given.trajectory.unique().tolist():
        own = (given.trajectory == trajectory) & (given.weights != 0)
        if first_turn:
            own &= given.turn == given.turn[given.trajectory == trajectory].min()
        score = float(given.advantages[own].mean())
        found[trajectory] = ((leaf[own] - anchor[own]).sum(), score, int(given.group[own][0]))
    return found


def dpo_pair(h: Tensor, k: Tensor, a: float, b: float) -> Tensor:
    return -logsigmoid(0.3 * (h - k) if a > b else 0.3 * (k - h))


def refuel_pair(h: Tensor, k: Tensor, a: float, b: float) -> Tensor:
    return ((h - k) / 0.7 - (a - b)).square()


@pytest.mark.parametrize(
    ("loss", "knobs", "pair", "anchor", "first"),
    [
        (dpo, {"beta": 0.3}, dpo_pair, "ref_logprobs", False),
        (refuel, {"eta": 0.7}, refuel_pair, "logprobs", True),
        (refuel, {"eta": 0.7, "turns": "all"}, refuel_pair, "logprobs", False),
    ],
)
def test_the_gradient_is_that_of_each_trajectorys_pairs(
    loss: Callable[..., Any], knobs: dict[str, Any], pair: Callable[..., Tensor], anchor: str, first: bool
) -> None:
    """Groups of four; the gradient of a token is that of the mean over its own trajectory's pairs."""
    whole, logprobs = sample_batch(seed=5)
    given = replace(whole, group=torch.zeros_like(whole.group))
    leaf = logprobs.clone().requires_grad_()
    base = given.logprobs if anchor == "logprobs" else given.extras[anchor]
    side = sums(given, leaf, base, first)
    values, _ = loss(leaf, given, **knobs)
    found = torch.tensor(gradient(values, leaf), dtype=torch.float64)
    for i, (h, a, _) in side.items():
        terms = [pair(h, k.detach(), a, b) for j, (k, b, _) in side.items() if j != i]
        own = given.trajectory == i
        expected = torch.autograd.grad(torch.stack(terms).mean(), leaf, retain_graph=True)[0]
        torch.testing.assert_close(found[own], expected[own], rtol=1e-9, atol=1e-12)
        assert values[own].tolist() == pytest.approx([float(torch.stack(terms).mean().detach())] * int(own.sum()))


def test_constant_weights_give_half_the_mean_over_pairs() -> None:
    whole, logprobs = sample_batch(seed=5)
    given = replace(whole, group=torch.zeros_like(whole.group))
    leaf = logprobs.clone().requires_grad_()
    side = sums(given, leaf, given.extras["ref_logprobs"])
    pairs = [dpo_pair(h, k, a, b) for (h, a, _), (k, b, _) in itertools.combinations(side.values(), 2)]
    expected = torch.autograd.grad(torch.stack(pairs).mean() / 2, leaf)[0]
    found = torch.autograd.grad((dpo(leaf, given, beta=0.3)[0] / 4).sum(), leaf)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_gradient_of_pacs_is_that_of_the_groups_sum() -> None:
    whole, logprobs = sample_batch(seed=5)
    given = replace(whole, group=torch.zeros_like(whole.group))
    leaf = logprobs.clone().requires_grad_()
    side = sums(given, leaf, given.extras["ref_logprobs"])
    h = torch.stack([each[0] for each in side.values()])
    psi = 0.4 * (h - (h.sum() - h) / 3)
    labels = torch.tensor([float(each[1] > 0) for each in side.values()], dtype=torch.float64)
    assert 0 < labels.sum() < 4
    expected = torch.autograd.grad(binary_cross_entropy_with_logits(psi, labels, reduction="sum"), leaf)[0]
    torch.testing.assert_close(
        torch.tensor(gradient(pacs(leaf, given, beta=0.4)[0], leaf), dtype=torch.float64), expected, rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("loss", [dpo, refuel, pacs])
def test_there_are_no_pairs_over_groups_nor_among_equals(loss: Callable[..., Any]) -> None:
    given, logprobs = two([1.0, 1.0, -1.0])
    apart = replace(given, group=torch.tensor([0, 0, 1]))
    assert loss(logprobs, apart)[0].tolist() == [0, 0, 0]
    equal = replace(given, advantages=torch.ones(3, dtype=torch.float64))
    assert loss(logprobs, equal)[0].tolist() == [0, 0, 0]
    assert gradient(loss(logprobs, equal)[0], logprobs) == [0, 0, 0]


@pytest.mark.parametrize(
    ("loss", "knobs", "message"),
    [
        (dpo, {"beta": 0.0}, "beta must be above 0"),
        (pacs, {"beta": -1.0}, "beta must be above 0"),
        (refuel, {"eta": 0.0}, "eta must be above 0"),
        (refuel, {"turns": "last"}, "turns must be 'first' or 'all'"),
    ],
)
def test_bad_knobs(loss: Any, knobs: dict[str, Any], message: str) -> None:
    given, logprobs = two([1.0, 1.0, -1.0])
    with pytest.raises(ConfigError, match=message):
        loss(logprobs, given, **knobs)
    if loss is not refuel:
        with pytest.raises(ConfigError, match="needs the reference policy's"):
            loss(logprobs, replace(given, extras={}))
