"""The policy that a KL penalty holds on to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from networks import network, plain_logprobs, random_rows, stock
from turnstile.batching.weights import token as token_weights
from turnstile.losses.kl import kl
from turnstile.losses.ppo import ppo
from turnstile.models.adapt import choose_trainable
from turnstile.trainer.learner import Learner, Objective, Plan
from turnstile.trainer.optim import constant
from turnstile.trainer.reference import Reference
from turnstile.types import Sampling


def test_it_stays_where_the_run_began(tmp_path: Path) -> None:
    model = network()
    start = stock(model)
    plan = Plan(lr=1e-2, schedule=constant, warmup=0, total=9, budget=40)
    learner = Learner(model, choose_trainable(model, "top", top_layers=1), plan)
    file = tmp_path / "reference.pt"
    reference = Reference(learner, file)
    rows = random_rows(6)
    objective = Objective(loss=ppo, weigh=token_weights, regularizers=((0.1, kl),))
    report, _, _ = learner.update(reference.annotate(rows, Sampling()), objective)
    assert report["loss/kl_ref"] == pytest.approx(0.0, abs=1e-6)
    moved = [parameter.detach().clone() for parameter in model.parameters()]
    annotated = reference.annotate(rows, Sampling())
    for row, marked in zip(rows, annotated, strict=True):
        with torch.no_grad():
            expected = plain_logprobs(start, row)
        np.testing.assert_allclose(marked.extras["ref_logprobs"][row.loss_mask], expected, atol=1e-5)
        assert not marked.extras["ref_logprobs"][~row.loss_mask].any()
        assert marked.logprobs is row.logprobs
    assert all(torch.equal(one, other) for one, other in zip(moved, model.parameters(), strict=True))
    report, _, _ = learner.update(annotated, objective)
    assert report["loss/kl_ref"] > 1e-4

    resumed = Reference(learner, file).annotate(rows, Sampling())  # the weights have moved, the file has not
    for one, other in zip(annotated, resumed, strict=True):
        assert np.array_equal(one.extras["ref_logprobs"], other.extras["ref_logprobs"])
