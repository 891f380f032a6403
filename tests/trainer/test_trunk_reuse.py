"""Training on what the engine kept of the frozen layers is training on what the trainer would compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from networks import network, stock
from turnstile.batching.weights import token as token_weights
from turnstile.engines.transformers import TransformersEngine
from turnstile.losses.ppo import ppo
from turnstile.models.adapt import choose_trainable
from turnstile.trainer.learner import Learner, Objective, Plan
from turnstile.trainer.optim import constant
from turnstile.types import Row, Sampling

OBJECTIVE = Objective(loss=ppo, weigh=token_weights)


async def sampled_rows(engine: TransformersEngine, groups: Sequence[str]) -> list[Row]:
    """Two turns of three attempts in each group, whose sessions are closed afterwards."""
    rows = []
    for group in groups:
        rng = np.random.default_rng(len(rows))
        prompt = rng.integers(3, 40, 7).astype(np.int32)
        for attempt in range(3):
            session = engine.open(group)
            first = await engine.generate(prompt, Sampling(max_tokens=4, seed=attempt), session)
            held = np.concatenate([prompt, first.token_ids, [5]]).astype(np.int32)
            second = await engine.generate(held, Sampling(max_tokens=3, seed=attempt), session)
            engine.close(session)
            tokens = np.concatenate([held, second.token_ids])
            mask = np.array([0] * 7 + [1] * 4 + [0] + [1] * 3, np.bool_)
            logprobs = np.zeros(15, np.float32)
            logprobs[mask] = np.concatenate([first.logprobs, second.logprobs])
            rows.append(
                Row(
                    token_ids=tokens, loss_mask=mask, logprobs=logprobs,
                    advantages=(mask * rng.normal()).astype(np.float32), versions=np.zeros(15, np.int32),
                    turn_ids=np.where(mask, 0, -1).astype(np.int32), origin=(group, attempt),
                )
            )  # fmt: skip
    return rows


def learner(model: Any) -> Learner:
    plan = Plan(lr=1e-2, schedule=constant, warmup=0, total=9, clip=1e9)
    return Learner(model, choose_trainable(model, "top", top_layers=1), plan)


async def test_same_update(words: Any) -> None:
    model = network(dtype=torch.float64, num_hidden_layers=3)
    ours, theirs = learner(model), learner(stock(model))
    engine = TransformersEngine(model, words)
    engine.keep_trunk(ours.frozen)
    rows = await sampled_rows(engine, ["a", "b"])
    short, _, shown = ours.update(rows, OBJECTIVE, lambda row: engine.trunk(row.origin[0], row.token_ids))
    full, _, expected = theirs.update(rows, OBJECTIVE)
    assert (short["tokens/trunk_known"], full["tokens/trunk_known"]) == (short["tokens/unique"], 0)
    for name, value in full.items():
        if not name.startswith(("seconds/", "tokens/trunk")):
            assert short[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    for mine, other in zip(shown, expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    for mine, other in zip(ours.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)


async def test_what_the_engine_no_longer_knows_is_computed(words: Any) -> None:
    """A published version, another group's row, and a row that goes on where the engine never was."""
    model = network(dtype=torch.float64)
    ours = learner(model)
    engine = TransformersEngine(model, words)
    engine.keep_trunk(ours.frozen)
    rows = await sampled_rows(engine, ["a"])
    elsewhere = replace(rows[0], token_ids=np.concatenate([rows[0].token_ids[:-2], [9, 9]]).astype(np.int32))

    def known(rows: Sequence[Row]) -> float:
        report, _, _ = ours.update(rows, OBJECTIVE, lambda row: engine.trunk(row.origin[0], row.token_ids))
        return report["tokens/trunk_known"]

    assert known(rows) > 0
    assert known([*rows, elsewhere]) == 0
    assert known([replace(rows[0], origin=("b", 0))]) == 0
    engine.publish(1)
    assert known(rows) == 0


async def test_pools_wait_for_the_trainer_and_go_with_the_weights(words: Any) -> None:
    model = network()
    engine = TransformersEngine(model, words)
    engine.keep_trunk(1)
    rows = await sampled_rows(engine, ["a"])
    assert engine.trunk("a", rows[0].token_ids).shape == (14, 32)  # the last token was never fed
    engine.keep_trunk(0)
    assert engine.trunk("a", rows[0].token_ids).shape == (0, 32)
