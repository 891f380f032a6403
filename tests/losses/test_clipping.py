"""Losses of the off-policy and clipping family against numbers computed by hand and against autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tokens import batch, gradient
from turnstile.batching.batch import Batch
from turnstile.errors import ConfigError
from turnstile.losses.check import sample_batch, select
from turnstile.losses.cispo import cispo
from turnstile.losses.covariance import clip_cov, kl_cov
from turnstile.losses.decoupled_ppo import decoupled_ppo
from turnstile.losses.entropy_balanced_clip import entropy_balanced_clip
from turnstile.losses.gmpo import gmpo
from turnstile.losses.gspo import gspo
from turnstile.losses.ppo import ppo
from turnstile.losses.reinforce import reinforce


def before(ratios: list[float]) -> list[float]:
    """Proximal log-probabilities that make pi / proximal these ratios."""
    return [-1 - math.log(ratio) for ratio in ratios]


def test_decoupled_ppo_by_hand() -> None:
    # pi / behaviour = 3.0, 0.6, 1.0 and pi / proximal = 1.5, 1.2, 0.5, so w = 2, 0.5, 2
    given, logprobs = batch([3.0, 0.6, 1.0], [1.0, 2.0, -1.0], {"proximal_logprobs": before([1.5, 1.2, 0.5])})
    loss, metrics = decoupled_ppo(logprobs, given, clip_high=0.3)
    assert metrics["correction"].tolist() == pytest.approx([2.0, 0.5, 2.0])
    assert loss.tolist() == pytest.approx([-2 * 1.3, -0.5 * 1.2 * 2, 2 * 0.8])
    assert metrics["clipped"].tolist() == [1, 0, 1]
    assert metrics["ratio"].tolist() == pytest.approx([1.5, 1.2, 0.5])
    assert gradient(loss, logprobs) == pytest.approx([0, -1.2, 0])
    capped, metrics = decoupled_ppo(logprobs, given, cap=1.9)
    assert capped.tolist() == pytest.approx([0, -1.2, 0])
    assert metrics["correction"].tolist() == pytest.approx([0, 0.5, 0])


def test_decoupled_ppo_is_ppo_where_the_sampler_is_the_proximal_policy() -> None:
    whole, logprobs = sample_batch()
    same = replace(whole, extras={"proximal_logprobs": whole.logprobs})
    torch.testing.assert_close(decoupled_ppo(logprobs, same)[0], ppo(logprobs, whole)[0])


def test_gspo_by_hand() -> None:
    # trajectory 0: ratios 1.2 and 0.8, s = sqrt(0.96); trajectory 1: 2 and 0.5, s = 1, and one of weight 0
    given, logprobs = batch(
        [1.2, 0.8, 2.0, 0.5, 9.0],
        [1.0, 1.0, -2.0, 3.0, 1.0],
        trajectory=[0, 0, 1, 1, 1],
        weights=[0.25, 0.25, 0.25, 0.25, 0.0],
    )
    loss, metrics = gspo(logprobs, given, clip_low=0.1, clip_high=0.1)
    s = math.sqrt(0.96)
    assert metrics["ratio"].tolist() == pytest.approx([s, s, 1, 1, 1])
    assert loss.tolist() == pytest.approx([-s, -s, 2, -3, -1])
    assert gradient(loss, logprobs) == pytest.approx([-s, -s, 2, -3, -1])
    loss, metrics = gspo(logprobs, given, clip_low=0.1, clip_high=0.1, unit="token")
    assert metrics["clipped"].tolist() == [1, 0, 0, 0, 0]
    assert loss.tolist()[:4] == pytest.approx([-1.1, -0.8, 4.0, -1.5])


def test_gspo_clips_whole_sequences() -> None:
    given, logprobs = batch([1.2, 1.2, 0.8, 0.8], [1.0, 1.0, 1.0, 1.0], turn=[0, 0, 1, 1])
    loss, metrics = gspo(logprobs, given, clip_low=0.1, clip_high=0.1, unit="turn")
    assert loss.tolist() == pytest.approx([-1.1, -1.1, -0.8, -0.8])
    assert metrics["clipped"].tolist() == [1, 1, 0, 0]
    assert gradient(loss, logprobs) == pytest.approx([0, 0, -0.8, -0.8])


def per_sequence(whole: Batch) -> Batch:
    """The batch with one advantage and the paper's weights 1 / (sequences * tokens) in each trajectory."""
    weighed = whole.weights != 0
    lengths = torch.bincount(whole.trajectory, weights=weighed.double())
    weights = torch.where(weighed, 1 / (len(lengths) * lengths[whole.trajectory]), 0)
    sequences = torch.tensor([1.0, -1.5, 0.5, -0.2], dtype=torch.float64)
    return replace(whole, advantages=sequences[whole.trajectory], weights=weights)


@pytest.mark.parametrize("bound", [0.01, 0.2, 5.0])
def test_gspo_is_the_papers_sequence_objective(bound: float) -> None:
    """-mean over sequences of min(s A, clip(s) A), by autograd through s itself."""
    whole, logprobs = sample_batch(seed=3)
    given = per_sequence(whole)
    leaf = logprobs.clone().requires_grad_()
    loss, _ = gspo(leaf, given, clip_low=min(bound, 1.0), clip_high=bound)
    terms = []
    for trajectory in range(4):
        own = (given.trajectory == trajectory) & (given.weights != 0)
        s = (leaf[own] - given.logprobs[own]).mean().exp()
        a = given.advantages[own][0]
        terms.append(-torch.minimum(s * a, s.clamp(1 - min(bound, 1.0), 1 + bound) * a))
    expected = torch.stack(terms).mean()
    total = (loss * given.weights).sum()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(total, leaf)[0], torch.autograd.grad(expected, leaf)[0], rtol=1e-10, atol=1e-14
    )


def test_gmpo_by_hand() -> None:
    # log-ratios 0.5 (cut to 0.4), -0.5 (kept, A > 0): s = exp(-0.05); then A < 0: 0.5 kept, -0.5 cut: s = exp(0.05)
    high, low = math.exp(0.5), math.exp(-0.5)
    given, logprobs = batch([high, low, high, low], [2.0, 2.0, -2.0, -2.0], trajectory=[0, 0, 1, 1])
    loss, metrics = gmpo(logprobs, given)
    s, t = math.exp(-0.05), math.exp(0.05)
    assert metrics["ratio"].tolist() == pytest.approx([s, s, t, t])
    assert metrics["clipped"].tolist() == [1, 0, 0, 1]
    assert loss.tolist() == pytest.approx([-2 * s, -2 * s, 2 * t, 2 * t])
    assert gradient(loss, logprobs) == pytest.approx([0, -2 * s, 2 * t, 0])


def test_gmpo_is_the_papers_sequence_objective() -> None:
    whole, logprobs = sample_batch(seed=3)
    given = per_sequence(whole)
    leaf = logprobs.clone().requires_grad_()
    total = (gmpo(leaf, given, clip_low=0.2, clip_high=0.3)[0] * given.weights).sum()
    terms = []
    for trajectory in range(4):
        own = (given.trajectory == trajectory) & (given.weights != 0)
        sign = given.advantages[own][0].sign()
        log_ratios = leaf[own] - given.logprobs[own]
        least = torch.minimum(sign * log_ratios, sign * log_ratios.clamp(-0.2, 0.3))  # the pessimistic one, as in PPO
        terms.append(-given.advantages[own][0] * (sign * least).mean().exp())
    expected = torch.stack(terms).mean()
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(total, leaf)[0], torch.autograd.grad(expected, leaf)[0], rtol=1e-10, atol=1e-14
    )


def test_cispo_by_hand() -> None:
    given, logprobs = batch([1.5, 6.0, 0.1], [2.0, 1.0, -3.0])
    loss, metrics = cispo(logprobs, given)
    assert loss.tolist() == pytest.approx([3.0, 5.0, -0.3])  # log pi = -1
    assert gradient(loss, logprobs) == pytest.approx([-3.0, -5.0, 0.3])
    assert metrics["clipped"].tolist() == [0, 1, 0]
    loss, metrics = cispo(logprobs, given, clip_low=0.2, clip_high=0.2)
    assert gradient(loss, logprobs) == pytest.approx([-2.4, -1.2, 2.4])
    assert metrics["clipped"].tolist() == [1, 1, 1]


def spread() -> tuple[Batch, torch.Tensor]:
    """log pi = 0, -1, -2, -5 (mean -2) and A = 3, -1, -1, -1 (mean 0): c = 6, -1, 0, 3."""
    given, _ = batch([1.0] * 4, [3.0, -1.0, -1.0, -1.0])
    logprobs = torch.tensor([0.0, -1.0, -2.0, -5.0], dtype=torch.float64)
    behaviour = logprobs - torch.tensor([1.1, 0.9, 1.0, 1.1], dtype=torch.float64).log()
    return replace(given, logprobs=behaviour), logprobs.requires_grad_()


def test_clip_cov_by_hand() -> None:
    given, logprobs = spread()
    loss, metrics = clip_cov(logprobs, given, low=1.0, high=5.0)
    assert metrics["covariance"].tolist() == pytest.approx([6.0, -1.0, 0.0, 3.0])
    assert loss.tolist() == pytest.approx([-3.3, 0.9, 1.0, 0.0])  # only the last has 1 < c < 5
    assert gradient(loss, logprobs) == pytest.approx([-3.3, 0.9, 1.0, 0.0])
    assert metrics["clipped"].tolist() == [0, 0, 0, 1]
    loss, metrics = clip_cov(logprobs, given, share=0.5, low=1.0, high=7.0)
    assert metrics["clipped"].tolist() == [1, 0, 0, 1]
    loss, metrics = clip_cov(logprobs, given, share=1.0, low=1.0, high=7.0, clip_high=0.05)
    assert loss.tolist() == pytest.approx([-3.15, 0.9, 1.0, 0.0])  # the first is PPO's to clip


def test_clip_cov_draws_a_share_that_hangs_on_the_token_alone() -> None:
    whole, logprobs = sample_batch(seed=1)
    knobs = {"share": 0.25, "low": -1e9, "high": 1e9, "clip_low": 1.0, "clip_high": 1e9}
    drawn = clip_cov(logprobs, whole, **knobs)[1]["clipped"]
    assert drawn.sum() == int(0.25 * 23)
    assert drawn[3] == 0  # weight 0
    order = torch.randperm(len(logprobs))
    again = clip_cov(logprobs[order], select(whole, order), **knobs)[1]["clipped"]
    assert torch.equal(again, drawn[order])
    elsewhere = clip_cov(logprobs, replace(whole, attempt=whole.attempt + 1), **knobs)[1]["clipped"]
    assert not torch.equal(elsewhere, drawn)


def test_kl_cov_by_hand() -> None:
    given, logprobs = spread()
    loss, metrics = kl_cov(logprobs, given, coef=2.0)
    assert metrics["held"].tolist() == [1, 0, 0, 0]
    penalty = 2 * math.log(1.1)
    assert loss.tolist() == pytest.approx([-3.3 + penalty, 0.9, 1.0, 1.1])
    assert gradient(loss, logprobs) == pytest.approx([-3.3 + 2.0, 0.9, 1.0, 1.1])
    assert kl_cov(logprobs, given, share=1.0)[1]["held"].tolist() == [1, 0, 0, 1]  # never where c <= 0


@pytest.mark.parametrize(
    "loss", [ppo, reinforce, decoupled_ppo, gspo, gmpo, cispo, clip_cov, kl_cov, entropy_balanced_clip]
)
def test_on_policy_all_of_them_are_reinforce(loss: Any) -> None:
    """Where sampler, trainer and policy are one, the gradient is -A * grad log pi; Clip-Cov's draw leaves some out."""
    whole, logprobs = sample_batch(seed=2)
    same = replace(whole, logprobs=logprobs, extras={"proximal_logprobs": logprobs})
    leaf = logprobs.clone().requires_grad_()
    values, metrics = loss(leaf, same)
    drawn = metrics["clipped"] if loss is clip_cov else torch.zeros_like(logprobs)
    expected = torch.where(drawn != 0, 0, -whole.advantages)
    torch.testing.assert_close(torch.tensor(gradient(values, leaf), dtype=torch.float64), expected)
    assert metrics["ratio"].tolist() == pytest.approx([1.0] * len(leaf))


@pytest.mark.parametrize(
    ("loss", "knobs", "message"),
    [
        (decoupled_ppo, {"cap": 0.0}, "cap must be above 0"),
        (decoupled_ppo, {"clip_low": 2.0}, "clip_low must be in"),
        (gspo, {"clip_high": -1.0}, "loss 'gspo': clip_low must be in"),
        (gspo, {"unit": "row"}, "unit must be 'token', 'turn' or 'trajectory', got 'row'"),
        (gmpo, {"clip_low": -1.0}, "loss 'gmpo': clip_low and clip_high"),
        (cispo, {"clip_low": 1.5}, "loss 'cispo': clip_low must be in"),
        (clip_cov, {"share": 0.0}, "share must be in"),
        (kl_cov, {"share": 1.5}, "share must be in"),
    ],
)
def test_bad_knobs(loss: Any, knobs: dict[str, Any], message: str) -> None:
    given, logprobs = batch([1.0], [1.0], {"proximal_logprobs": [0.0]})
    with pytest.raises(ConfigError, match=message):
        loss(logprobs, given, **knobs)


def test_without_proximal_log_probabilities_there_is_one_clear_error() -> None:
    given, logprobs = batch([1.0], [1.0])
    with pytest.raises(ConfigError, match="loss 'decoupled_ppo' needs the policy's log-probabilities before the step"):
        decoupled_ppo(logprobs, given)
