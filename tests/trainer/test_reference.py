"""Log-probability providers: reference policy, proximal policy, teacher; and the mean entropy of earlier steps."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from networks import network, plain_logprobs, random_rows, stock
from turnstile.batching.weights import token as token_weights
from turnstile.errors import ConfigError
from turnstile.losses.kl import kl
from turnstile.losses.ppo import ppo
from turnstile.losses.reinforce import reinforce
from turnstile.models.adapt import choose_trainable
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant
from turnstile.trainer.reference import PastEntropy, ProximalPolicy, ReferencePolicy, TeacherPolicy
from turnstile.types import Row, Sampling


def test_reference_stays_the_initial_policy(tmp_path: Path) -> None:
    model = network()
    start = stock(model)
    plan = LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=9, budget=40)
    learner = Learner(model, choose_trainable(model, "top", top_layers=1), plan)
    reference = ReferencePolicy(learner, tmp_path)
    rows = random_rows(6)
    objective = Objective(loss=ppo, aggregation=token_weights, regularizers=((0.1, kl),))
    report, _, _ = learner.update(reference.provide(rows, Sampling()), objective)
    assert report["loss/kl_ref"] == pytest.approx(0.0, abs=1e-6)
    moved = [parameter.detach().clone() for parameter in model.parameters()]
    with_logprobs = reference.provide(rows, Sampling())
    for row, marked in zip(rows, with_logprobs, strict=True):
        with torch.no_grad():
            expected = plain_logprobs(start, row)
        np.testing.assert_allclose(marked.extras["ref_logprobs"][row.loss_mask], expected, atol=1e-5)
        assert not marked.extras["ref_logprobs"][~row.loss_mask].any()
        assert marked.logprobs is row.logprobs
    assert all(torch.equal(one, other) for one, other in zip(moved, model.parameters(), strict=True))
    report, _, _ = learner.update(with_logprobs, objective)
    assert report["loss/kl_ref"] > 1e-4

    resumed = ReferencePolicy(learner, tmp_path, step=1).provide(
        rows, Sampling()
    )  # the weights have changed, the file has not
    for one, other in zip(with_logprobs, resumed, strict=True):
        assert np.array_equal(one.extras["ref_logprobs"], other.extras["ref_logprobs"])


def test_reference_is_reset_and_resumes_with_the_run(tmp_path: Path) -> None:
    learner, rows = learner_of(network()), random_rows(6)
    reference = ReferencePolicy(learner, tmp_path, every=2, keep=1)
    was = [stock(learner.model)]
    for step in range(1, 7):
        learner.update(rows, Objective(loss=ppo, aggregation=token_weights))
        assert learner.optimizer.state
        reference.on_step_end(step)
        assert bool(learner.optimizer.state) == bool(step % 2)  # the optimiser begins anew
        was.append(stock(learner.model))
        for row in reference.provide(rows, Sampling()):
            is_of(was[step - step % 2], row, row.extras["ref_logprobs"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["reference-000004.pt", "reference-000006.pt"]
    for row in ReferencePolicy(learner, tmp_path, step=5, every=2, keep=1).provide(rows, Sampling()):
        is_of(was[4], row, row.extras["ref_logprobs"])
    assert [file.name for file in tmp_path.iterdir()] == ["reference-000004.pt"]


def learner_of(model: PreTrainedModel) -> Learner:
    plan = LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=9, budget=40)
    return Learner(model, list(model.parameters()), plan)


def is_of(model: PreTrainedModel, row: Row, values: np.ndarray) -> None:
    with torch.no_grad():
        np.testing.assert_allclose(values[row.loss_mask], plain_logprobs(stock(model), row), atol=1e-5)
    assert not values[~row.loss_mask].any()


def test_proximal_policy_is_the_current_one() -> None:
    learner, rows = learner_of(network()), random_rows(6)
    for _ in range(2):
        for row in ProximalPolicy(learner).provide(rows, Sampling()):
            is_of(learner.model, row, row.extras["proximal_logprobs"])
            assert "ref_logprobs" in row.extras  # earlier extras stay
        learner.update(rows, Objective(loss=ppo, aggregation=token_weights))


def test_teacher_stays_fixed() -> None:
    learner, other, rows = learner_of(network()), network(seed=1), random_rows(6)
    teacher = TeacherPolicy(other, learner)
    learner.update(rows, Objective(loss=ppo, aggregation=token_weights))
    for row in teacher.provide(rows, Sampling()):
        is_of(network(seed=1), row, row.extras["teacher_logprobs"])
    with pytest.raises(ConfigError, match=r"train.teacher has a vocabulary of 41 tokens and the policy one of 40"):
        TeacherPolicy(network(vocab_size=41), learner)


def test_warns_of_a_teacher_without_prefix_sharing(caplog: pytest.LogCaptureFixture) -> None:
    other, rows = network("mistral", seed=1, sliding_window=4), random_rows(6)
    teacher = TeacherPolicy(other, learner_of(network()))
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("turnstile")]
    assert line.startswith("train.teacher: model family 'mistral' has layers that are not plain causal attention")
    for row in teacher.provide(rows, Sampling()):
        is_of(network("mistral", seed=1, sliding_window=4), row, row.extras["teacher_logprobs"])


def test_past_entropy_is_the_mean_of_earlier_steps() -> None:
    learner, rows = learner_of(network()), random_rows(6)
    objective = Objective(loss=ppo, aggregation=token_weights)
    assert np.isnan(PastEntropy(learner).provide(rows, Sampling())[0].extras["entropy_past"]).all()
    seen = [learner.update(rows, objective)[0]["policy/entropy"] for _ in range(3)]
    again = learner_of(network())
    again.restore(learner.state())
    for row in PastEntropy(again).provide(rows, Sampling()):
        np.testing.assert_allclose(row.extras["entropy_past"], np.full(len(row.token_ids), np.mean(seen)), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", ["all", "lora"])
def test_without_an_update_ratios_are_one(train: Literal["all", "lora"], dtype: torch.dtype) -> None:
    """The same weights give the same log-probabilities with gradients and without."""
    model = network(dtype=dtype)
    chosen = choose_trainable(model, train, top_layers=0, lora_rank=3)
    if train == "lora":
        for parameter in chosen:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    learner = Learner(model, chosen, LearnerConfig(lr=0.0, schedule=constant, warmup=0, total=1))
    rows = ProximalPolicy(learner).provide(random_rows(), Sampling())
    _, _, trained = learner.update(rows, Objective(loss=reinforce, aggregation=token_weights))
    for row, new in zip(rows, trained, strict=True):
        ratios = np.exp(new - row.extras["proximal_logprobs"])
        np.testing.assert_allclose(ratios, 1.0, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-5)
