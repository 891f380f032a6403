"""Demonstrations to rows, and that learning from them lowers the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from episodes import f32, i32, trajectory, turn
from networks import network
from turnstile.batching.weights import token as token_weights
from turnstile.losses.sft import sft
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant
from turnstile.trainer.sft import demo_rows, warm_start
from turnstile.types import F32, Row

FIRST, SECOND = turn(i32(1, 2), i32(11, 12)), turn(i32(3), i32(13, 14))


def test_tokens_of_a_demonstration_count_one() -> None:
    (row,) = demo_rows([trajectory(FIRST, SECOND)])
    assert row.advantages.tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert row.temperature == 1.0  # the text was written, not sampled


def test_tokens_count_as_they_are_told() -> None:
    (row,) = demo_rows([trajectory(FIRST, SECOND)], lambda demo, k: f32(3 + k, 1))
    assert row.advantages.tolist() == [0, 0, 3, 1, 0, 4, 1]


def test_demonstrations_that_only_show_are_left_out() -> None:
    shown = trajectory(replace(FIRST, trainable=False))
    (row,) = demo_rows([shown, trajectory(replace(FIRST, trainable=False), SECOND)])
    assert row.loss_mask.tolist() == [False] * 5 + [True, True]


def rows() -> list[Row]:
    """Token x after the prompt is followed by x + 1."""
    return demo_rows([trajectory(turn(i32(5, x), i32(x + 1, 4))) for x in range(10, 30)])


def learn(seed: int, **knobs: Any) -> tuple[list[float], dict[str, float], Learner]:
    model = network()
    learner = Learner(model, list(model.parameters()), LearnerConfig(lr=3e-3, schedule=constant, warmup=2, total=100))
    losses: list[float] = []
    seen: list[tuple[int, int]] = []

    def report(done: int, total: int, metrics: dict[str, float]) -> None:
        seen.append((done, total))
        losses.append(metrics["loss/total"])

    objective = Objective(loss=sft, aggregation=token_weights)
    last = warm_start(learner, rows(), objective, seed=seed, report=report, **knobs)
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    return losses, last, learner


def test_the_loss_falls() -> None:
    losses, last, learner = learn(0, epochs=12, batch=8)
    assert len(losses) == 12 * 3  # batches of 8, 8 and 4
    assert learner.step == 36
    assert np.mean(losses[:3]) > 3.0
    assert np.mean(losses[-3:]) < 0.5
    assert last["loss/total"] == losses[-1]


def test_the_order_is_drawn_from_the_seed() -> None:
    orders: list[list[list[int]]] = []

    class RecordingLearner(Learner):
        def __init__(self) -> None:
            orders.append([])

        def update(
            self, rows: Any, objective: Any, activations: Any = None
        ) -> tuple[dict[str, float], list[F32], list[F32]]:
            orders[-1].append([int(row.token_ids[1]) for row in rows])
            return {}, [], []

    for seed in (1, 1, 2):
        warm_start(
            RecordingLearner(), rows(), Objective(loss=sft, aggregation=token_weights), epochs=2, batch=8, seed=seed
        )
    assert orders[0] == orders[1] != orders[2]
    epochs = [sorted(token for part in orders[0][i : i + 3] for token in part) for i in (0, 3)]
    assert epochs == [list(range(10, 30))] * 2
    assert orders[0][:3] != orders[0][3:]


@pytest.mark.parametrize(("epochs", "batch", "steps"), [(1, 20, 1), (2, 100, 2)])
def test_batches(epochs: int, batch: int, steps: int) -> None:
    assert len(learn(0, epochs=epochs, batch=batch)[0]) == steps
