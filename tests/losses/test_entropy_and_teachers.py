"""Losses on entropy, teachers, forgetting and critics against numbers computed by hand and against autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tokens import batch, gradient
from turnstile.errors import ConfigError
from turnstile.losses.check import sample_batch, select
from turnstile.losses.distill import distill, self_distill
from turnstile.losses.entropy import entropy
from turnstile.losses.entropy_balanced_clip import entropy_balanced_clip
from turnstile.losses.entropy_band import entropy_band
from turnstile.losses.forward_kl import forward_kl
from turnstile.losses.kl import kl
from turnstile.losses.multipliers import with_multipliers
from turnstile.losses.ppo import ppo
from turnstile.losses.reinforce import reinforce
from turnstile.losses.selection import high_entropy_only
from turnstile.losses.value import value


def test_entropy_by_hand() -> None:
    given, logprobs = batch([1.0, 1.0], [0.0, 0.0], {"entropy": [0.5, 2.0]})
    given.extras["entropy"].requires_grad_()
    loss, metrics = entropy(logprobs, given)
    assert loss.tolist() == [-0.5, -2.0]
    assert gradient(loss, given.extras["entropy"]) == [-1, -1]
    assert metrics["entropy"].tolist() == [0.5, 2.0]


def test_entropy_band_by_hand() -> None:
    nan = float("nan")
    extras = {"entropy": [0.5, 0.9, 1.1, 2.0, 5.0], "entropy_past": [1.0, 1.0, 1.0, 1.0, nan]}
    given, logprobs = batch([1.0] * 5, [0.0] * 5, extras)
    given.extras["entropy"].requires_grad_()
    loss, metrics = entropy_band(logprobs, given)
    assert loss.tolist() == pytest.approx([0.3, 0, 0, 0.8, 0])
    assert gradient(loss, given.extras["entropy"]) == [-1, 0, 0, 1, 0]
    assert metrics["outside"].tolist() == [1, 0, 0, 1, 0]


def test_entropy_balanced_clip_by_hand() -> None:
    given, logprobs = batch([2.0, 0.5, 1.1, 0.5, 2.0], [1.0, -1.0, 3.0, 1.0, -1.0])
    loss, metrics = entropy_balanced_clip(logprobs, given, clip_high=0.3)
    assert loss.tolist() == pytest.approx([-1.3, 0.8, -3.3, -0.5, 2.0])
    assert gradient(loss, logprobs) == pytest.approx([-1.3, 0, -3.3, -0.5, 2.0])
    assert metrics["clipped"].tolist() == [1, 1, 0, 0, 0]
    both, _ = entropy_balanced_clip(logprobs, given, clip_high=0.3, keep="both")
    assert both.tolist() == pytest.approx(loss.tolist())
    assert gradient(both, logprobs) == pytest.approx([-1.3, 0.8, -3.3, -0.5, 2.0])
    assert loss.tolist() == pytest.approx(ppo(logprobs, given, clip_high=0.3)[0].tolist())


def test_high_entropy_only_by_hand() -> None:
    given, logprobs = batch(
        [1.0] * 6, [1.0] * 6, {"entropy": [0.1, 3.0, 0.2, 9.0, 0.3, 2.0]}, weights=[1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    )
    assert high_entropy_only(given)[0].tolist() == [0, 1, 0, 0, 0, 0]  # a fifth of five
    assert high_entropy_only(given, share=0.4)[0].tolist() == [0, 1, 0, 0, 0, 1]
    assert high_entropy_only(given, share=1.0)[0].tolist() == [1, 1, 1, 0, 1, 1]
    loss, metrics = with_multipliers(reinforce, [high_entropy_only])(logprobs, given)
    assert gradient(loss, logprobs) == [0, -1, 0, 0, 0, 0]
    assert metrics["learns"].tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("estimator", "stored"), [("k1", True), ("k3", True), ("k1", False), ("k3", False)])
def test_forward_kl_has_the_gradient_of_the_divergence(estimator: Any, stored: bool) -> None:
    """Expected over every token: of the reference where samples are stored, else of a policy that w corrects for."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    behaviour = reference if stored else torch.randn(5, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = (reference.exp() * (reference - policy)).sum()
    whole, _ = sample_batch()
    given = select(whole, torch.zeros(5, dtype=torch.int64))
    given = replace(given, logprobs=behaviour, extras={"ref_logprobs": reference})
    loss, metrics = forward_kl(policy, given, estimator=estimator, cap=1e9)
    expected = (behaviour.exp() * loss).sum()
    torch.testing.assert_close(expected, exact, rtol=1e-10, atol=1e-12)
    found, wanted = (torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (expected, exact))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert torch.equal(metrics["kl_forward"], loss.detach())


def test_forward_kl_by_hand() -> None:
    # pi / behaviour = 1, 0.5 and log reference = -0.5, -1: reference / behaviour = e^0.5, 0.5
    given, logprobs = batch([1.0, 0.5], [0.0, 0.0], {"ref_logprobs": [-0.5, -1.0]})
    loss, _ = forward_kl(logprobs, given, estimator="k1")
    assert loss.tolist() == pytest.approx([math.exp(0.5) * 0.5, 0.0])
    assert gradient(loss, logprobs) == pytest.approx([-math.exp(0.5), -0.5])
    loss, _ = forward_kl(logprobs, given, cap=1.0)
    assert loss.tolist() == pytest.approx([math.exp(-0.5) - 0.5, 0.0])
    assert gradient(loss, logprobs) == pytest.approx([math.exp(-0.5) - 1, 0.0])


@pytest.mark.parametrize(
    ("loss", "name", "metric"),
    [(distill, "teacher_logprobs", "kl_teacher"), (self_distill, "feedback_logprobs", "kl_feedback")],
)
def test_a_teacher_is_the_reference_of_a_kl(loss: Any, name: str, metric: str) -> None:
    given, logprobs = batch([1.0, 2.0], [9.0, 9.0], {name: [-1.5, 0.0]})
    values, metrics = loss(logprobs, given)
    assert values.tolist() == pytest.approx([0.5, -1.0])
    assert metrics[metric].tolist() == pytest.approx([0.5, -1.0])
    assert gradient(values, logprobs) == pytest.approx([0.5, -2.0])  # ratio * d
    same = replace(given, extras={"ref_logprobs": given.extras[name]})
    for estimator in ("k1", "k2", "k3"):
        one, other = loss(logprobs, given, estimator=estimator)[0], kl(logprobs, same, estimator=estimator)[0]
        assert one.tolist() == other.tolist()


def test_value_by_hand() -> None:
    # old 0, returns 1: v = 0.1 within the clip, 0.5 cut to 0.2, and -0.5 further off than -0.2
    given, values = batch([1.0] * 3, [0.0] * 3, {"values": [0.0] * 3, "returns": [1.0] * 3})
    values = torch.tensor([0.1, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    loss, metrics = value(values, given)
    assert loss.tolist() == pytest.approx([0.81 / 2, 0.64 / 2, 2.25 / 2])
    assert gradient(loss, values) == pytest.approx([-0.9, 0, -1.5])
    assert metrics["clipped"].tolist() == [0, 1, 0]
    assert metrics["value_error"].tolist() == pytest.approx([0.81, 0.25, 2.25])
    plain, _ = value(values, given, clip=None)
    assert gradient(plain, values) == pytest.approx([-0.9, -0.5, -1.5])


@pytest.mark.parametrize(
    ("loss", "knobs", "message"),
    [
        (entropy, {}, "loss 'entropy' needs the policy's entropy at each token"),
        (entropy_band, {"low": 2.0}, "0 <= low <= high"),
        (entropy_balanced_clip, {"keep": "low"}, "keep must be 'high' or 'both'"),
        (forward_kl, {"estimator": "k2"}, "must be .k1. or .k3."),
        (forward_kl, {"cap": 0.0}, "cap must be above 0"),
        (distill, {}, "loss 'distill' needs the teacher's"),
        (self_distill, {}, "given feedback"),
        (value, {"clip": 0.0}, "clip must be above 0"),
        (value, {}, "a critic's values before the step"),
    ],
)
def test_bad_knobs_and_missing_arrays(loss: Any, knobs: dict[str, Any], message: str) -> None:
    given, logprobs = batch([1.0], [1.0])
    with pytest.raises(ConfigError, match=message):
        loss(logprobs, given, **knobs)
    with pytest.raises(ConfigError, match="share must be in"):
        high_entropy_only(given, share=0.0)
