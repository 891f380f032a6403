"""Rehearsal of stored samples, against the gradients of both losses by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from made_groups import attempt
from networks import distance, gradient, network, random_rows
from turnstile.batching.weights import token as token_weights
from turnstile.losses.forward_kl import forward_kl
from turnstile.losses.kl import kl
from turnstile.losses.ppo import ppo
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant
from turnstile.trainer.rehearsal import Rehearsal

PPO = Objective(loss=ppo, aggregation=token_weights, regularizers=((0.5, kl),))
STORED = Objective(loss=forward_kl, coefficient=0.25, aggregation=token_weights)


class GradientOnly(Learner):
    """A learner that keeps its gradient instead of stepping."""

    def _step(self) -> dict[str, float]:
        return {}


def found(objective: Objective, rows: Any, stored: Any = None) -> tuple[dict[str, float], dict[str, Tensor]]:
    model = network()
    held = GradientOnly(
        model, list(model.parameters()), LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=9, budget=48)
    )
    report, _, _ = held.update(rows, objective, None, stored)
    return report, gradient(model)


def test_adds_the_gradient_of_stored_samples_times_its_coefficient() -> None:
    rows, samples = random_rows(6), random_rows(4, seed=7)
    _, both = found(PPO, rows, (samples, STORED))
    _, plain = found(PPO, rows)
    _, alone = found(Objective(loss=forward_kl, aggregation=token_weights), samples)
    expected = {name: plain[name] + 0.25 * alone[name] for name in plain}
    assert max(distance(both, expected)) < 1e-4
    assert distance(both, plain)[1] > 1e-3  # the stored samples have a gradient


def test_fresh_rows_keep_their_weights_and_metrics() -> None:
    rows, samples = random_rows(6), random_rows(4, seed=7)
    both, _ = found(PPO, rows, (samples, STORED))
    plain, _ = found(PPO, rows)
    alone, _ = found(Objective(loss=forward_kl, aggregation=token_weights), samples)
    assert {name: both[name] for name in plain if name != "seconds/update"} == pytest.approx(
        {name: value for name, value in plain.items() if name != "seconds/update"}, abs=1e-6
    )
    assert both["rehearsal/kl_forward"] == pytest.approx(alone["loss/kl_forward"], abs=1e-6)


def rehearsal(seed: int = 0, batch: int = 2) -> Rehearsal:
    episodes = tuple(attempt(i, [1, 2], group="rehearsal/0/t") for i in range(6))
    return Rehearsal(episodes=episodes, objective=STORED, batch=batch, seed=seed)


def test_a_step_draws_the_same_samples_every_time() -> None:
    drawn = {seed: [row.origin for row in rehearsal(seed).rows(3)] for seed in range(6)}
    assert drawn[0] == [row.origin for row in rehearsal().rows(3)]
    assert len(drawn[0]) == 2
    assert len({tuple(keys) for keys in drawn.values()}) > 1
    assert len({tuple(row.origin for row in rehearsal().rows(step)) for step in range(1, 9)}) > 1
    assert len(rehearsal(batch=99).rows(1)) == 6


def test_reference_logprobs_are_the_recorded_ones() -> None:
    for row in rehearsal().rows(1):
        assert row.extras["ref_logprobs"] is row.logprobs
        assert row.advantages[row.loss_mask].tolist() == [1.0] * 3
        assert np.array_equal(row.logprobs[row.loss_mask], np.full(3, -0.5, np.float32))


def test_no_samples_change_nothing() -> None:
    rows = random_rows(6)
    with_none, one = found(PPO, rows, ([], STORED))
    without, other = found(PPO, rows)
    assert with_none.keys() == without.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
