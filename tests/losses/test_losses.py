"""Token losses and their gradients against numbers computed by hand, and the KL against its exact gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tokens import batch, gradient
from turnstile.errors import ConfigError
from turnstile.losses.check import sample_batch, select
from turnstile.losses.kl import kl
from turnstile.losses.ppo import ppo
from turnstile.losses.reinforce import reinforce
from turnstile.losses.sft import sft


def test_ppo_by_hand() -> None:
    given, logprobs = batch([1.5, 1.5, 0.5, 0.5, 1.1], [2.0, -2.0, 2.0, -2.0, 1.0])
    loss, metrics = ppo(logprobs, given)
    assert loss.tolist() == pytest.approx([-2.4, 3.0, -1.0, 1.6, -1.1])
    assert metrics["clipped"].tolist() == [1, 0, 0, 1, 0]
    assert metrics["ratio"].tolist() == pytest.approx([1.5, 1.5, 0.5, 0.5, 1.1])
    assert metrics["kl_behaviour"].tolist()[0] == pytest.approx(1.5 - 1 - math.log(1.5))
    # d(-ratio A) / d log pi = -ratio A, and 0 where clipped
    assert gradient(loss, logprobs) == pytest.approx([0, 3.0, -1.0, 0, -1.1])


def test_ppo_bounds_are_separate() -> None:
    given, logprobs = batch([1.5, 0.5], [1.0, -1.0])
    loss, metrics = ppo(logprobs, given, clip_low=0.1, clip_high=0.6)
    assert loss.tolist() == pytest.approx([-1.5, 0.9])
    assert metrics["clipped"].tolist() == [0, 1]


def test_dual_clip_by_hand() -> None:
    given, logprobs = batch([5.0, 2.0, 5.0], [-2.0, -2.0, 2.0])
    loss, metrics = ppo(logprobs, given, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([6.0, 4.0, -2.4])
    assert metrics["clipped"].tolist() == [1, 0, 1]
    assert gradient(loss, logprobs) == pytest.approx([0, 4.0, 0])


def test_on_policy_ppo_and_reinforce_have_the_same_gradient() -> None:
    given, logprobs = batch([1.0, 1.0], [0.7, -1.3])
    assert gradient(ppo(logprobs, given)[0], logprobs) == pytest.approx([-0.7, 1.3])
    loss, metrics = reinforce(logprobs, given)
    assert loss.tolist() == pytest.approx([0.7, -1.3])
    assert gradient(loss, logprobs) == pytest.approx([-0.7, 1.3])
    assert metrics["kl_behaviour"].tolist() == [0, 0]


def test_sft_weighs_each_token() -> None:
    given, logprobs = batch([1.0, 1.0, 1.0], [1.0, 3.0, 0.0])
    loss, metrics = sft(logprobs, given)
    assert loss.tolist() == [1.0, 3.0, 0.0]
    assert gradient(loss, logprobs) == [-1.0, -3.0, 0.0]
    assert metrics["nll"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [math.exp(-0.5) - 0.5, math.e - 2])]
)
def test_kl_values_by_hand(estimator: Any, expected: list[float]) -> None:
    given, logprobs = batch([1.0, 1.0], [9.0, 9.0], extras={"ref_logprobs": [-1.5, 0.0]})
    loss, metrics = kl(logprobs, given, estimator=estimator)
    assert loss.tolist() == pytest.approx(expected)
    assert metrics["kl_ref"].tolist() == pytest.approx(expected)
    assert gradient(loss, logprobs) == pytest.approx([0.5, -1.0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_kl_gradient_is_that_of_the_divergence(estimator: Any, on_policy: bool) -> None:
    """Expected over every token of a categorical policy, the gradient is exact; also for tokens of another policy."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    behaviour = policy.detach() if on_policy else torch.randn(5, dtype=torch.float64).log_softmax(0)
    [exact] = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    whole, _ = sample_batch()
    given = replace(
        select(whole, torch.zeros(5, dtype=torch.int64)), logprobs=behaviour, extras={"ref_logprobs": reference}
    )
    loss, _ = kl(policy, given, estimator=estimator)
    [estimated] = torch.autograd.grad((behaviour.exp() * loss).sum(), logits)
    torch.testing.assert_close(estimated, exact, rtol=1e-10, atol=1e-12)


def test_kl_without_a_reference_is_one_clear_error() -> None:
    given, logprobs = batch([1.0], [1.0])
    with pytest.raises(ConfigError, match=r"'ref_logprobs' \(has: none\)") as caught:
        kl(logprobs, given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "knobs", "message"),
    [
        (ppo, {"clip_low": -0.1}, "clip_low must be in"),
        (ppo, {"dual_clip": 0.5}, "dual_clip must be above 1"),
        (kl, {"estimator": "k4"}, "must be .k1., .k2. or .k3."),
    ],
)
def test_bad_knobs(loss: Any, knobs: dict[str, Any], message: str) -> None:
    given, logprobs = batch([1.0], [1.0], extras={"ref_logprobs": [0.0]})
    with pytest.raises(ConfigError, match=message):
        loss(logprobs, given, **knobs)
