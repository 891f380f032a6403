"""An accelerator computes what a plain pass in double precision on the CPU gives.

Without one, the tests run on the CPU, and on a device that refuses what a GPU refuses.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import standin
from networks import distance, gradient, network, plain_logprobs, random_rows, stock, trained
from turnstile.batching.weights import token as token_weights
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.losses.reinforce import reinforce
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import constant
from turnstile.types import Sampling

DEVICES = [
    "cpu",
    "standin",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
]
OBJECTIVE = Objective(loss=reinforce, aggregation=token_weights)


def wide() -> PreTrainedModel:
    """Heads of 16 numbers or more, as FlexAttention's kernels need."""
    return network(hidden_size=64, max_position_embeddings=512)


def put(model: PreTrainedModel, device: str) -> PreTrainedModel:
    return standin.put(model) if device == "standin" else model.to(device)  # type: ignore[arg-type]


def exact(model: PreTrainedModel) -> PreTrainedModel:
    return stock(copy.deepcopy(model).to("cpu", torch.float64))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [True, False])
def test_update_matches_rows_one_by_one(device: str, share: bool) -> None:
    """With about 300 tokens, more than a block of FlexAttention has."""
    plain = exact(wide())
    rows = random_rows(24, trunk=40, private=20)
    weights = token_weights(rows)
    for row, w in zip(rows, weights, strict=True):
        (-trained(row, row.advantages * w).double() * plain_logprobs(plain, row)).sum().backward()
    expected = gradient(plain)
    model = put(wide(), device)
    plan = LearnerConfig(lr=0.0, schedule=constant, warmup=0, total=1, clip=float("inf"), share=share)
    learner, found = Learner(model, list(model.parameters()), plan), dict[str, Tensor]()
    learner._step = lambda: found.update(gradient(model)) or {}  # type: ignore[method-assign,func-returns-value]
    report, _, logprobs = learner.update(rows, OBJECTIVE)
    assert report["tokens/unique"] > 256
    for row, mine in zip(rows, logprobs, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(trained(row, mine).double(), plain_logprobs(plain, row), rtol=0, atol=1e-4)
    worst, whole = distance({name: slope.cpu().double() for name, slope in found.items()}, expected)
    assert worst < 1e-4
    assert whole < 2e-5


@pytest.mark.parametrize("device", DEVICES)
async def test_sampled_logprobs_match_the_trainer(device: str, bytes_: Any) -> None:
    model = wide()
    plain, engine = exact(model), TransformersEngine(put(model, device), bytes_)
    prompt = np.arange(3, 30, dtype=np.int32)
    turns = [engine.generate(prompt, Sampling(max_tokens=40, seed=seed % 3), engine.open("group")) for seed in range(6)]
    for found in await asyncio.gather(*turns):
        path = torch.from_numpy(np.concatenate([prompt, found.token_ids])).long()
        with torch.no_grad():
            likely = plain(path[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = likely.gather(1, path[len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(found.logprobs, wanted.numpy(), atol=1e-4)
        np.testing.assert_allclose(found.entropies, -(likely.exp() * likely).sum(-1).numpy(), atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_update_changes_the_next_samples(device: str, bytes_: Any) -> None:
    """The engine samples from the trained weights themselves, once they are published."""
    model = put(wide(), device)
    engine = TransformersEngine(model, bytes_)
    prompt, how = np.arange(3, 30, dtype=np.int32), Sampling(max_tokens=8, temperature=0.0)
    before = asyncio.run(engine.generate(prompt, how, engine.open("before")))
    plan = LearnerConfig(lr=0.05, schedule=constant, warmup=0, total=1)
    learner = Learner(model, list(model.parameters()), plan)
    for _ in range(3):
        learner.update(random_rows(), OBJECTIVE)
    engine.publish(1)
    after = asyncio.run(engine.generate(prompt, how, engine.open("after")))
    assert after.token_ids.tolist() != before.token_ids.tolist()
    assert after.versions.tolist() == [1] * len(after.token_ids)
    path = torch.from_numpy(np.concatenate([prompt, after.token_ids])).long()
    with torch.no_grad():
        best = exact(model)(path[None]).logits[0, len(prompt) - 1 : -1].argmax(-1)
    assert best.tolist() == after.token_ids.tolist()
