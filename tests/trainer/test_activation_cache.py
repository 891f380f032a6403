"""Updates on activations that the engine cached equal updates on activations that the trainer computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from networks import network, random_rows, stock
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.weights import token as token_weights
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.losses.covariance import clip_cov
from turnstile.losses.ppo import ppo
from turnstile.models.adapt import choose_trainable
from turnstile.models.frozen_layers import forward_below
from turnstile.trainer import activation_cache as module
from turnstile.trainer.activation_cache import ActivationCache, saved_flops_share
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant
from turnstile.trainer.prepare import TrainingRows
from turnstile.trainer.step import update
from turnstile.types import F32, Row, Sampling

OBJECTIVE = Objective(loss=ppo, aggregation=token_weights)


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


def learner(model: Any, train: Literal["all", "top", "lora"] = "top") -> Learner:
    config = LearnerConfig(lr=1e-2, schedule=constant, warmup=0, total=9, clip=1e9)
    return Learner(model, choose_trainable(model, train, top_layers=1), config)


def cache_of(engine: TransformersEngine, learner: Learner, *, keep: bool = False) -> ActivationCache | None:
    return learner.activation_cache(lambda row: engine.activations(row.origin[0], row.token_ids), keep=keep)


Update = tuple[Learner, dict[str, float], list[F32]]
"""A learner after an update, its report and the log-probabilities before."""


def assert_same_update(one: Update, two: Update) -> None:
    for name, value in two[1].items():
        if not name.startswith(("seconds/", "tokens/activations_cached", "update/saved")):
            assert one[1][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    for mine, other in zip(one[2], two[2], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    for mine, other in zip(one[0].parameters, two[0].parameters, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("train", ["top", "lora"])
async def test_cached_activations_give_the_same_update(words: Any, train: Literal["top", "lora"]) -> None:
    model = network(dtype=torch.float64, num_hidden_layers=3)
    theirs, ours = learner(stock(model), train), learner(model, train)
    engine = TransformersEngine(model, words)
    engine.keep_activations(ours.frozen)
    rows = await sampled_rows(engine, ["a", "b"])
    short, _, shown = ours.update(rows, OBJECTIVE, cache_of(engine, ours))
    full, _, expected = theirs.update(rows, OBJECTIVE)
    assert (short["tokens/activations_cached"], full["tokens/activations_cached"]) == (short["tokens/unique"], 0)
    assert_same_update((ours, short, shown), (theirs, full, expected))


async def test_computes_activations_that_the_engine_no_longer_holds(words: Any) -> None:
    """A row with tokens that the engine never saw; a row of another group; all rows after new weights."""
    model = network(dtype=torch.float64, num_hidden_layers=3)
    ours, theirs = learner(model), learner(stock(model))
    engine = TransformersEngine(model, words)
    engine.keep_activations(ours.frozen)
    rows = await sampled_rows(engine, ["a", "b"])
    elsewhere = replace(rows[0], token_ids=np.concatenate([rows[0].token_ids[:-2], [9, 9]]).astype(np.int32))
    mixed = [rows[1], elsewhere, *rows[2:]]
    short, _, shown = ours.update(mixed, OBJECTIVE, cache_of(engine, ours))
    full, _, expected = theirs.update(mixed, OBJECTIVE)
    assert short["tokens/activations_cached"] == short["tokens/unique"] - len(elsewhere.token_ids)
    assert_same_update((ours, short, shown), (theirs, full, expected))

    def known(rows: Sequence[Row]) -> float:
        return ours.update(rows, OBJECTIVE, cache_of(engine, ours))[0]["tokens/activations_cached"]

    assert known(rows) > 0
    assert known([replace(rows[0], origin=("c", 0))]) == 0
    engine.publish(1)
    assert known(rows) == 0


@pytest.mark.parametrize("train", ["top", "lora"])
def test_frozen_layers_run_once_for_all_epochs(train: Literal["top", "lora"]) -> None:
    """An empty cache; two epochs of two minibatches each, with stored rows in every optimiser step."""
    model = network(dtype=torch.float64, num_hidden_layers=3)
    theirs, ours = learner(stock(model), train), learner(model, train)
    rows, stored = random_rows(8, seed=1), (random_rows(3, seed=2), OBJECTIVE)
    cache = ours.activation_cache(keep=True)
    for number, part in enumerate([rows[:4], rows[4:]] * 2):
        short, _, shown = ours.update(part, OBJECTIVE, cache, stored)
        full, _, expected = theirs.update(part, OBJECTIVE, None, stored)
        assert_same_update((ours, short, shown), (theirs, full, expected))
        assert short["tokens/activations_cached"] == (0 if number < 2 else short["tokens/unique"])
        assert (short["update/saved"] > 0) == (number > 1)


def test_shared_prefixes_are_cached_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of the trees goes through the frozen layers once, and is stored once."""
    ours, rows = learner(network(num_hidden_layers=3)), random_rows(8)
    below: list[Tensor] = []

    def counted(*arguments: Any) -> Tensor:
        below.append(forward_below(*arguments))
        return below[-1]

    monkeypatch.setattr(module, "forward_below", counted)
    cache = ours.activation_cache(keep=True)
    assert cache is not None
    found = [cache.get(part) for part in (rows[:5], rows, rows[3:])]
    (one,) = pack_prefix_trees(rows[:5], token_weights(rows[:5]), budget=8192)
    (two,) = pack_prefix_trees(rows[5:], token_weights(rows[5:]), budget=8192)
    assert [count for _, count in found] == [one.size, two.size, 0]
    assert [len(each) for each in below] == [one.size, two.size]
    assert {id(kept) for _, kept, _ in cache._cache.values()} == {id(each) for each in below}


@pytest.mark.parametrize("kind", ["epochs", "scope", "stored", "none"])
def test_caches_rows_that_are_used_again_in_the_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second epoch, the extra pass of a loss over the whole step, stored rows beside the next minibatch."""
    ours = learner(network(num_hidden_layers=3))
    calls: list[int] = []
    monkeypatch.setattr(module, "forward_below", lambda *given: calls.append(len(given[2])) or forward_below(*given))
    rows, stored = random_rows(6), random_rows(2, seed=3)
    update(
        [], TrainingRows(rows=[rows[:3], rows[3:]], groups=[0, 1], zero_advantage=0), ours,
        replace(OBJECTIVE, loss=clip_cov) if kind == "scope" else OBJECTIVE,
        epochs=2 if kind == "epochs" else 1,
        minibatches=2 if kind == "stored" else 1,
        stored=(stored, OBJECTIVE) if kind == "stored" else None,
    )  # fmt: skip
    parts = {"epochs": [rows], "scope": [rows], "stored": [rows[:3], stored, rows[3:]], "none": []}[kind]
    sizes = [sum(b.size for b in pack_prefix_trees(part, token_weights(part), budget=8192)) for part in parts]
    assert sorted(calls) == sorted(sizes)


def test_computes_nothing_ahead_that_would_not_be_kept() -> None:
    ours, rows = learner(network()), random_rows(4)
    cache = ours.activation_cache()
    assert cache is not None
    assert cache.get(rows) == (None, 0)
    assert learner(network(), "all").activation_cache() is None


def test_saved_flops_share_by_hand() -> None:
    """Three layers, the last of which learns; 10 tokens, 5 of which are known, 4 trained."""
    model = network(num_hidden_layers=3)
    learner(model)
    layer = sum(p.numel() for p in model.get_decoder().layers[0].parameters() if p.ndim > 1)
    head = model.get_output_embeddings().weight.numel()
    whole = 2 * 2 * layer * 10 + 6 * layer * 10 + 4 * head * 4
    assert saved_flops_share(model, 2, 5, 10, 4) == pytest.approx(2 * 2 * layer * 5 / whole)


async def test_engine_keeps_activations_for_the_trainer_until_switched_off(words: Any) -> None:
    model = network()
    engine = TransformersEngine(model, words)
    engine.keep_activations(1)
    rows = await sampled_rows(engine, ["a"])
    assert engine.activations("a", rows[0].token_ids).shape == (14, 32)  # the last token was never fed
    engine.keep_activations(0)
    assert engine.activations("a", rows[0].token_ids).shape == (0, 32)
