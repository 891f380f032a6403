"""Training on a device: checkpoints, weight files and references restore there, with few synchronisations."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import guess_run
import standin
from networks import network, random_rows
from standin import DEVICE, OnDevice, reads
from turnstile.batching.weights import token as token_weights
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.envs.guess import GuessEnv
from turnstile.losses.reinforce import reinforce
from turnstile.models.adapt import choose_trainable
from turnstile.models.load import load_model
from turnstile.runs.train import train
from turnstile.trainer import checkpoint
from turnstile.trainer.learner import Learner, LearnerConfig, Objective
from turnstile.trainer.optim import linear
from turnstile.trainer.publish import WeightFiles, WeightFolders
from turnstile.trainer.reference import ReferencePolicy
from turnstile.types import Sampling

OBJECTIVE = Objective(loss=reinforce, aggregation=token_weights)
PLAN = LearnerConfig(lr=1e-2, schedule=linear, warmup=1, total=6)
Train = Literal["all", "top", "lora"]
TRAINS: list[Train] = ["all", "top", "lora"]


def learner(train: Train, *, seed: int = 0, device: torch.device = DEVICE) -> Learner:
    model = network(seed=seed)
    if device == DEVICE:
        standin.put(model)
    return Learner(model, choose_trainable(model, train, top_layers=1 if train == "top" else 0, lora_rank=2), PLAN)


def state(of: Learner) -> dict[str, torch.Tensor]:
    """Return every tensor of a learner, by its path."""
    moments = of.optimizer.state_dict()["state"]
    kept = {f"{number}.{name}": value for number, own in moments.items() for name, value in own.items()}
    return dict(of.model.state_dict()) | kept


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.mark.parametrize("train", TRAINS)
def test_a_run_on_a_device_resumes(train: Train, tmp_path: Path, words: Any) -> None:
    original, rows = learner(train), random_rows(4)
    original.update(rows, OBJECTIVE)
    saved = checkpoint.save(tmp_path, 1, original, words, {}, auxiliary={"head": torch.ones(3, device=DEVICE)})
    expected = drawn()

    other = learner(train)
    other.update(random_rows(2, seed=5), OBJECTIVE)  # so that its state differs
    checkpoint.restore(saved, other)
    assert drawn() == expected
    found = state(other)
    for name, value in state(original).items():
        step = name.endswith(".step")  # AdamW keeps its step count on the host
        assert isinstance(found[name], OnDevice) != step, name
        assert found[name].tolist() == value.tolist(), name
    for each in (original, other):
        each.update(rows, OBJECTIVE)
    assert {n: v.tolist() for n, v in state(other).items()} == {n: v.tolist() for n, v in state(original).items()}


@pytest.mark.parametrize("train", TRAINS)
def test_update_equals_that_of_the_cpu(train: Train) -> None:
    here, there = learner(train, device=torch.device("cpu")), learner(train)
    for each in (here, there):
        for _ in range(2):
            each.update(random_rows(6), OBJECTIVE, each.activation_cache())
    for one, other in zip(here.parameters, there.parameters, strict=True):
        assert isinstance(other, OnDevice)
        torch.testing.assert_close(other.cpu(), one, rtol=0, atol=2e-4)  # AdamW's step is as large for a tiny gradient


@pytest.mark.parametrize("count", [6, 30])
def test_synchronisations_of_an_update_do_not_grow_with_rows(count: int) -> None:
    """One to lay out a forest, two for its numbers and log-probabilities, one for their rows, one for the norm."""
    trained = learner("all")
    with reads() as counted:
        report, _, _ = trained.update(random_rows(count), OBJECTIVE)
    assert report["tokens/trained"] > count
    assert sum(counted.values()) <= 5, counted


async def test_synchronisations_of_a_sampled_token_do_not_grow_with_sessions(bytes_: Any) -> None:
    """One to check that the logits are finite, one to read the sampled token."""
    engine = TransformersEngine(standin.put(network()), bytes_, speculative_tokens=0)
    prompt, how = np.arange(3, 9, dtype=np.int32), Sampling(max_tokens=5)
    with reads() as counted:
        await asyncio.gather(*(engine.generate(prompt, how, engine.open("group")) for _ in range(4)))
    assert sum(counted.values()) <= 3 * 5, counted


async def test_scores_of_tokens_are_those_that_they_were_sampled_with(bytes_: Any) -> None:
    engine = TransformersEngine(standin.put(network()), bytes_)
    session, prompt = engine.open("group"), np.arange(3, 9, dtype=np.int32)
    found = await engine.generate(prompt, Sampling(max_tokens=5), session)
    np.testing.assert_allclose(await engine.score(prompt, found.token_ids, session), found.logprobs, atol=1e-5)


def test_weights_are_published_from_a_device(tmp_path: Path, words: Any) -> None:
    own = learner("all")
    files, folders = WeightFiles(tmp_path / "files", own), WeightFolders(tmp_path / "folders", own.model, words)
    found = load_file(files.write(1))
    for name, parameter in own.model.named_parameters():
        assert found[name].tolist() == parameter.tolist()
    published = load_model(str(folders.write(1)), device="standin")
    assert logits(published) == logits(own.model)


def logits(model: PreTrainedModel) -> Any:
    with torch.no_grad():
        return model(torch.arange(3, 9, device=DEVICE)[None]).logits.tolist()


def test_reference_policy_restores_on_the_device(tmp_path: Path) -> None:
    own, rows = learner("all"), random_rows(4)
    first = ReferencePolicy(own, tmp_path).provide(rows, Sampling())
    own.update(rows, OBJECTIVE)
    again = ReferencePolicy(own, tmp_path, step=1)
    assert all(isinstance(value, OnDevice) for value in again._values)
    for one, other in zip(first, again.provide(rows, Sampling()), strict=True):
        np.testing.assert_array_equal(one.extras["ref_logprobs"], other.extras["ref_logprobs"])


def test_a_whole_run_on_a_device(tmp_path: Path) -> None:
    """A warm start, a reference, a critic, an update, a checkpoint and an evaluation."""
    network = {"id": str(tmp_path / "model"), "device": "standin", "threads": 1}
    recipe = guess_run.recipe(tmp_path, sections={"model": network, "engine": {"kind": "transformers"}}, steps=1)
    train(recipe, run=tmp_path / "run", env=GuessEnv)
    found, complaints = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert (found.step, complaints) == (1, [])
