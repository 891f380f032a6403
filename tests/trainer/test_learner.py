"""Optimiser steps of the learner against a reference implementation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from networks import UNSHARED, gradient, network, plain_logprobs, random_rows, stock, trained
from turnstile.batching.batch import Batch
from turnstile.batching.weights import constant as constant_weights
from turnstile.batching.weights import token as token_weights
from turnstile.losses.kl import kl
from turnstile.losses.ppo import ppo
from turnstile.losses.reinforce import reinforce
from turnstile.losses.sft import sft
from turnstile.models.adapt import choose_trainable
from turnstile.models.logprobs import token_logprobs
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant, linear
from turnstile.types import Row, Sampling

PPO = Objective(loss=ppo, aggregation=token_weights)


def plan(**changes: Any) -> LearnerConfig:
    return replace(LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=10, clip=1e9), **changes)


def learner(model: PreTrainedModel, **changes: Any) -> Learner:
    return Learner(model, list(model.parameters()), plan(**changes))


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def near_policy(model: PreTrainedModel, rows: Sequence[Row], spread: float = 0.5) -> list[Row]:
    """The rows with recorded log-probabilities near the model's own, so that some ratios are clipped."""
    rng, found = np.random.default_rng(0), []
    with torch.no_grad():
        for row in rows:
            recorded = np.zeros(len(row.token_ids), np.float32)
            own = plain_logprobs(model, row).float().numpy()
            recorded[row.loss_mask] = own + spread * rng.normal(size=len(own)).astype(np.float32)
            found.append(replace(row, logprobs=recorded))
    return found


def ppo_by_hand(model: PreTrainedModel, rows: Sequence[Row]) -> dict[str, Tensor]:
    """The gradient of -min(r A, clip(r, .8, 1.2) A) averaged over all trained tokens, row by row."""
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    for row in rows:
        r = (plain_logprobs(model, row) - trained(row, row.logprobs)).exp()
        a = trained(row, row.advantages)
        (-torch.minimum(r * a, r.clamp(0.8, 1.2) * a).sum() / tokens).backward()
    return gradient(model)


class AdamWByHand:
    """AdamW with decoupled weight decay (arXiv 1711.05101), after gradient-norm clipping."""

    def __init__(self, model: PreTrainedModel, lr: float, decay: float, clip: float) -> None:
        self.model, self.lr, self.decay, self.clip, self.steps = model, lr, decay, clip, 0
        self.m: dict[str, Any] = dict.fromkeys(weights_of(model), 0.0)
        self.v: dict[str, Any] = dict.fromkeys(weights_of(model), 0.0)

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], factor: float = 1.0) -> float:
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        self.steps += 1
        for name, parameter in self.model.named_parameters():
            g = grads[name] * min(1.0, self.clip / (norm + 1e-6))
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g * g
            m, v = self.m[name] / (1 - 0.9**self.steps), self.v[name] / (1 - 0.999**self.steps)
            parameter *= 1 - factor * self.lr * self.decay
            parameter -= factor * self.lr * m / (v.sqrt() + 1e-8)
        return norm


def test_updates_equal_a_reference_implementation() -> None:
    """Three steps with warm-up, weight decay and gradient clipping."""
    model = network(dtype=torch.float64)
    plain = stock(model)
    rows = near_policy(plain, random_rows(6, seed=2))
    ours = learner(model, schedule=linear, warmup=1, total=3, weight_decay=0.1, clip=0.05)
    theirs = AdamWByHand(plain, lr=1e-2, decay=0.1, clip=0.05)
    for factor in (0.5, 1.0, 0.55):
        metrics, _, _ = ours.update(rows, PPO)
        norm = theirs.step(ppo_by_hand(plain, rows), factor)
        assert metrics["optim/grad_norm"] == pytest.approx(norm)
        assert norm > 0.05
        assert metrics["optim/lr"] == pytest.approx(1e-2 * factor)
        assert metrics["optim/skipped"] == 0
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights_of(model)[name], parameter.detach(), rtol=0, atol=1e-9)
    assert ours.step == 3


def test_token_budget_changes_neither_update_nor_report() -> None:
    start = network(dtype=torch.float64)
    rows = near_policy(stock(start), random_rows(9, seed=5))
    found = []
    for budget in (10_000, 30, 1):
        model = stock(start)
        metrics, _, logprobs = learner(model, budget=budget).update(rows, PPO)
        found.append((weights_of(model), metrics, np.concatenate(logprobs)))
    for weights, metrics, logprobs in found[1:]:
        for name, expected in found[0][0].items():
            torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-9)
        np.testing.assert_allclose(logprobs, found[0][2], atol=1e-6)
        for name, value in metrics.items():
            if not name.startswith(("seconds/", "tokens/unique")):
                assert value == pytest.approx(found[0][1][name], rel=1e-6), name
    assert found[2][1]["tokens/unique"] > found[0][1]["tokens/unique"]


def test_update_report() -> None:
    model = network()
    rows = near_policy(stock(model), random_rows(5, seed=6), spread=0.0)
    expected = [plain_logprobs(stock(model), row).detach() for row in rows]
    metrics, weights, logprobs = learner(model).update(rows, PPO)
    for row, own, share, found in zip(rows, expected, weights, logprobs, strict=True):
        np.testing.assert_allclose(found[row.loss_mask], own, atol=1e-5)
        assert not found[~row.loss_mask].any()
        assert not share[~row.loss_mask].any()
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    advantages = np.concatenate([row.advantages[row.loss_mask] for row in rows])
    assert np.concatenate(weights).sum() == pytest.approx(1.0)
    assert metrics["tokens/trained"] == tokens
    assert metrics["tokens/rows"] == sum(len(row.token_ids) for row in rows) > metrics["tokens/unique"]
    assert metrics["policy/logprob_gap"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["loss/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["loss/clipped"] == 0
    assert metrics["loss/total"] == pytest.approx(-advantages.mean(), abs=1e-5)
    assert 0 < metrics["policy/entropy"] < math.log(40)


def test_metric_means_do_not_depend_on_the_sum_of_weights() -> None:
    rows = random_rows(5, seed=6)
    reports = [
        learner(network()).update(rows, Objective(loss=ppo, aggregation=aggregation))[0]
        for aggregation in (token_weights, lambda rows: constant_weights(rows, divisor=7.0))
    ]
    tokens = reports[0]["tokens/trained"]
    for name in ("policy/entropy", "policy/logprob_gap", "loss/ratio", "loss/clipped"):
        assert reports[0][name] == pytest.approx(reports[1][name], rel=1e-5)
    assert reports[1]["loss/total"] == pytest.approx(reports[0]["loss/total"] * tokens / 7, rel=1e-5)


def test_regularizers_add_to_the_loss() -> None:
    start = network(dtype=torch.float64)
    rows = near_policy(stock(start), random_rows(5, seed=7))
    both = Objective(loss=reinforce, aggregation=token_weights, regularizers=((0.5, kl), (2.0, sft)))
    model = stock(start)
    ours = learner(model)
    metrics, _, _ = ours.update(rows, both)
    plain = stock(start)
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    total = 0.0
    for row in rows:
        logp = plain_logprobs(plain, row)
        a, reference = trained(row, row.advantages), trained(row, row.extras["ref_logprobs"])
        d = logp - reference
        ratio = (logp - trained(row, row.logprobs)).exp().detach()
        value = -a * logp + 0.5 * ((-d).exp() - 1 + d) - 2.0 * a * logp
        total += float(value.sum().detach()) / tokens
        slope = -3.0 * a * logp + 0.5 * ratio * d.detach() * logp
        (slope.sum() / tokens).backward()
    AdamWByHand(plain, 1e-2, 0.0, 1e9).step(gradient(plain))
    assert metrics["loss/total"] == pytest.approx(total)
    assert {"loss/kl_ref", "loss/nll"} <= metrics.keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights_of(model)[name], parameter.detach(), rtol=0, atol=1e-8)


def test_applies_the_truncation_of_sampling() -> None:
    model = network(dtype=torch.float64)
    rows = random_rows(3, seed=8)
    how = Sampling(top_k=3)
    with torch.no_grad():
        expected = []
        for row in rows:
            tokens = torch.from_numpy(row.token_ids).long()
            hidden = stock(model).get_decoder()(tokens[None], use_cache=False).last_hidden_state[0]
            at = torch.from_numpy(np.flatnonzero(row.loss_mask))
            cold = torch.full((len(at),), 0.75)
            expected.append(token_logprobs(model, hidden[at - 1], tokens[at], cold, how)[0])
    _, _, logprobs = learner(model).update(rows, replace(PPO, sampling=how))
    for row, found, own in zip(rows, logprobs, expected, strict=True):
        np.testing.assert_allclose(found[row.loss_mask], own, atol=1e-5)


def test_skips_a_gradient_that_is_not_finite() -> None:
    model = network()
    ours = learner(model)
    rows = random_rows(4, seed=9)
    ours.update(rows, PPO)
    before, moments = weights_of(model), ours.optimizer.state_dict()["state"][0]["exp_avg"].clone()

    def broken(logprobs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.where(batch.row == 2, logprobs / 0, -logprobs), {}

    metrics, _, _ = ours.update(rows, Objective(loss=broken, aggregation=token_weights))
    assert metrics["optim/skipped"] == 1
    assert not math.isfinite(metrics["optim/grad_norm"])
    assert all(torch.equal(before[name], value) for name, value in weights_of(model).items())
    assert torch.equal(moments, ours.optimizer.state_dict()["state"][0]["exp_avg"])
    assert ours.step == 2
    metrics, _, _ = ours.update(rows, PPO)
    assert metrics["optim/skipped"] == 0
    assert math.isfinite(metrics["optim/grad_norm"])
    assert not torch.equal(before["lm_head.weight" if "lm_head.weight" in before else "model.embed_tokens.weight"],
                           model.get_output_embeddings().weight)  # fmt: skip


def test_updates_trainable_parameters_only() -> None:
    model = network()
    layer = model.get_decoder().layers[1]
    model.requires_grad_(False)
    layer.requires_grad_(True)
    before = weights_of(model)
    Learner(model, list(layer.parameters()), plan()).update(random_rows(4, seed=9), PPO)
    moved = {name for name, value in weights_of(model).items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if ".layers.1." in name}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("family", "knobs", "why"), UNSHARED)
def test_trains_unsupported_families_row_by_row(
    family: str, knobs: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = network(family, **knobs)
    before, plain = weights_of(model), network(family, **knobs)
    rows = near_policy(plain, random_rows(5, seed=3))
    ours = learner(model, budget=40, checkpointing=True)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("turnstile")]
    assert line.startswith(f"model family '{family}' ")
    assert why in line
    assert line.endswith(": rows are trained one by one, and shared prefixes are computed for each row")
    metrics, _, logprobs = ours.update(rows, PPO)
    assert metrics["tokens/unique"] == metrics["tokens/rows"]
    for row, found in zip(rows, logprobs, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(found[row.loss_mask], plain_logprobs(plain, row), atol=2e-5)
    AdamWByHand(plain, 1e-2, 0.0, 1e9).step(ppo_by_hand(plain, rows))
    assert not all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    moved = torch.cat([(value - before[name]).flatten() for name, value in weights_of(model).items()])
    expected = torch.cat([(value - before[name]).flatten() for name, value in weights_of(plain).items()])
    assert torch.nn.functional.cosine_similarity(moved, expected, dim=0) > 0.99


@pytest.mark.parametrize(("dtype", "train", "warned"), [
    (torch.bfloat16, "all", True), (torch.bfloat16, "lora", False), (torch.float32, "all", False),
])  # fmt: skip
def test_warns_of_trained_parameters_below_float32(
    dtype: torch.dtype, train: Literal["all", "lora"], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = network(dtype=dtype)
    Learner(model, choose_trainable(model, train), plan())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("turnstile")]
    assert [line.partition(",")[0] for line in lines] == [
        "the trained parameters have less precision than float32"
    ] * warned


def test_neither_checkpointing_nor_sharing_changes_an_update() -> None:
    start = network(dtype=torch.float64)
    rows = near_policy(stock(start), random_rows(9, seed=5))
    found = []
    for changes in ({}, {"checkpointing": True}, {"share": False}):
        model = stock(start)
        metrics, _, _ = learner(model, **changes).update(rows, PPO)
        found.append((weights_of(model), metrics["tokens/unique"]))
    for weights, _ in found[1:]:
        for name, expected in found[0][0].items():
            torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-9)
    assert found[0][1] == found[1][1] < found[2][1]


@pytest.mark.parametrize("train", ["all", "top", "lora"])
def test_update_is_bit_reproducible_in_two_threads(train: Literal["all", "top", "lora"]) -> None:
    """Several tokens follow one hidden state; threads must sum their gradients in a fixed order."""
    model = network(hidden_size=256, intermediate_size=512, vocab_size=2000, max_position_embeddings=512)
    chosen = choose_trainable(model, train, top_layers=0 if train == "all" else 1, lora_rank=8)
    rows = random_rows(24, trunk=60, private=80, vocabulary=2000)
    learner = Learner(model, chosen, LearnerConfig(lr=0.0, schedule=constant, warmup=0, total=99, clip=float("inf")))
    found = set()

    def keep() -> dict[str, float]:
        slopes = [parameter.grad.numpy() for parameter in chosen if parameter.grad is not None]
        found.add(hashlib.sha256(b"".join(slope.tobytes() for slope in slopes)).hexdigest())
        return {}

    learner._step = keep  # type: ignore[method-assign]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(10):
            learner.update(rows, PPO, learner.activation_cache())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
