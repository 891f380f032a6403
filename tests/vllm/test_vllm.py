"""The real vLLM with the real SmolLM2-135M: `make test-vllm`, or TURNSTILE_VLLM names the Python that has it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from turnstile.cli.main import run as command
from turnstile.engines.remote.dialects.base import CERTAINTY_TOLERANCE
from turnstile.engines.remote.openai import OpenAIEngine
from turnstile.engines.remote.router import Router
from turnstile.engines.remote.weights import PublishedWeights
from turnstile.errors import ConfigError
from turnstile.models.load import load_model, load_tokenizer, model_folder
from turnstile.models.logprobs import truncate
from turnstile.trainer.checkpoint import save_model
from turnstile.types import I32, Completion, Sampling

PYTHON = os.environ.get("TURNSTILE_VLLM", "")
MODEL = "smollm2-135m"
STARTING = 600.0  # seconds
CLOSE = 2e-3  # log-probabilities of two programs, float32

pytestmark = pytest.mark.skipif(not PYTHON, reason="TURNSTILE_VLLM names no Python with vLLM; make test-vllm does")


class VLLM:
    """A server of the model; without `training` it is started as for anybody."""

    def __init__(self, folder: Path, *, training: bool = True) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = folder / f"vllm-{self.port}.log"
        self._training = training
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model_folder(MODEL)]
        command += ["--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "1024"]
        command += ["--max-num-seqs", "16", "--enforce-eager", "--host", "127.0.0.1", "--port", str(self.port)]
        if self._training:
            command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
        environment = {"VLLM_SERVER_DEV_MODE": "1"} if self._training else {}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
            )
        deadline = time.monotonic() + STARTING
        while "Application startup complete" not in self._log.read_text(errors="replace"):
            assert self.process.poll() is None, self._log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def kill(self) -> None:
        os.killpg(self.process.pid, 9)  # it has processes of its own
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    found = VLLM(tmp_path_factory.mktemp("vllm"))
    yield found
    found.kill()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model(MODEL, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def prompt() -> I32:
    text = "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n"
    return np.array(load_tokenizer(MODEL).encode(text), np.int32)


@pytest.fixture
async def engine(server: VLLM, prompt: I32) -> AsyncIterator[OpenAIEngine]:
    made = OpenAIEngine(server.url, training=True, key="")
    await made.connect(prompt)
    yield made
    await made.disconnect()


def given(model: PreTrainedModel, below: Path, version: int) -> PublishedWeights:
    folder = below / str(version)
    save_model(model, load_tokenizer(MODEL), folder)
    return PublishedWeights(version=version, folder=folder, owner="test", serial=version, head=False)


@torch.no_grad()
def changed(seed: int) -> PreTrainedModel:
    """The model with other weights, but for its embedding, which is its output layer too (see below)."""
    model = load_model(MODEL, device="cpu", dtype="float32")
    torch.manual_seed(seed)
    for parameter in model.model.layers.parameters():
        parameter.add_(0.02 * parameter.std() * torch.randn_like(parameter))
    model.model.norm.weight.mul_(1.02)
    return model


@torch.no_grad()
def trainers(model: PreTrainedModel, prompt: I32, found: Completion) -> list[float]:
    """The trainer's log-probabilities of what was sampled."""
    path = torch.from_numpy(np.concatenate([prompt, found.token_ids])).long()[None]
    logits = model(path).logits[0, len(prompt) - 1 : -1] / found.sampling.temperature
    logp = truncate(logits, found.sampling).log_softmax(dim=-1)
    return [float(logp[place, token]) for place, token in enumerate(found.token_ids.tolist())]


async def asked(engine: OpenAIEngine | Router, prompt: I32, how: Sampling) -> Completion:
    session = engine.open("g")
    try:
        return await engine.generate(prompt, how, session)
    finally:
        engine.close(session)


async def test_ids_and_log_probabilities_are_the_trainers(
    engine: OpenAIEngine, model: PreTrainedModel, prompt: I32, tmp_path: Path
) -> None:
    await engine.load(given(model, tmp_path, 1))
    for how in (
        Sampling(max_tokens=24, seed=1),
        Sampling(max_tokens=24, seed=2, temperature=0.7, top_k=20),
        Sampling(max_tokens=24, seed=3, temperature=1.3, top_p=0.8, stop=(".",)),
    ):
        found = await asked(engine, prompt, how)
        np.testing.assert_allclose(found.logprobs, trainers(model, prompt, found), atol=CLOSE)
        assert set(found.versions.tolist()) == {1}
    assert found.finish in ("stop", "length")
    again = await asked(engine, prompt, Sampling(max_tokens=24, seed=1))
    assert again.token_ids.tolist() == (await asked(engine, prompt, Sampling(max_tokens=24, seed=1))).token_ids.tolist()


async def test_new_weights_are_the_ones_that_sample_and_what_was_cached_is_forgotten(
    engine: OpenAIEngine, prompt: I32, tmp_path: Path
) -> None:
    long = np.concatenate([prompt] * 8)  # more than a block of its prefix cache
    how = Sampling(max_tokens=16, seed=5)
    for version in (2, 3):
        other = changed(version)
        await engine.load(given(other, tmp_path, version))
        for _ in range(2):  # the second time from its cache
            found = await asked(engine, long, how)
            np.testing.assert_allclose(found.logprobs, trainers(other, long, found), atol=CLOSE)
            assert set(found.versions.tolist()) == {version}


async def test_weights_change_between_two_tokens(
    engine: OpenAIEngine, model: PreTrainedModel, prompt: I32, tmp_path: Path
) -> None:
    await engine.load(given(model, tmp_path, 4))
    going = asyncio.ensure_future(asked(engine, prompt, Sampling(max_tokens=200, seed=9, temperature=1.5)))
    other = changed(5)
    weights = given(other, tmp_path, 5)
    await asked(engine, prompt, Sampling(max_tokens=8))  # by now the other one is under way
    await engine.load(weights)
    found = await going
    assert sorted(found.versions.tolist()) == found.versions.tolist()
    assert set(found.versions.tolist()) == {4, 5}
    before, after = trainers(model, prompt, found), trainers(other, prompt, found)
    for place, version in enumerate(found.versions.tolist()):
        assert abs(found.logprobs[place] - (before if version == 4 else after)[place]) < CLOSE, place


def test_training_over_vllm(server: VLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    recipe = Path(__file__).parents[2] / "recipes" / "guess.toml"
    over = ["engine.kind=openai", f"engine.url={server.url}", "engine.key=", "model.dtype=float32", "model.device=cpu",
            "sft.demos=0", "eval.before=false", "eval.tasks=2", "train.steps=2", "rollout.tasks_per_step=2",
            "rollout.group_size=4", "train.drop_zero_advantage_groups=false", "train.lr=1e-3"]  # fmt: skip
    assert command(["train", str(recipe), "--out", str(run), *over]) == 0
    assert command(["audit", str(run), "--record"]) == 0
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged] == [1, 2]
    for entry in logged:
        assert entry["policy/logprob_gap"] < CLOSE  # sampled with the weights that are trained
        assert entry["staleness/max"] == 0
        assert entry["tokens/sampled"] > 0
    with capsys.disabled():
        gaps = ", ".join(f"{entry['policy/logprob_gap']:.1e}" for entry in logged)
        speed = ", ".join(f"{entry['tokens/per_second']:.0f}" for entry in logged)
        print(f"\nmean gap of log-probabilities between vLLM and the trainer: {gaps}; tokens/s: {speed}", flush=True)


async def test_a_server_that_was_killed_is_given_its_weights_when_it_is_back(
    server: VLLM, model: PreTrainedModel, prompt: I32, tmp_path: Path
) -> None:
    router = Router(
        [OpenAIEngine(server.url, training=True, key="", retries=0)], health_interval=0.5, reconnect_timeout=STARTING
    )
    await router.connect(prompt)
    router.publish(given(model, tmp_path, 6))
    how = Sampling(max_tokens=400, seed=1, temperature=1.5)
    going = asyncio.ensure_future(asked(router, prompt, how))
    await asyncio.sleep(2)
    server.kill()
    await asyncio.to_thread(server.start)
    found = await going
    assert set(found.versions.tolist()) == {6}
    assert router.take_stats()["requests"] == 1
    await router.disconnect()


async def test_an_output_layer_that_would_not_be_renewed_is_refused(
    engine: OpenAIEngine, model: PreTrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is vLLM on a CPU, which does not reload an output layer"):
        await engine.load(replace(given(model, tmp_path, 7), head=True))


async def test_a_server_that_was_not_started_for_training_is_refused_and_evaluates(prompt: I32, tmp_path: Path) -> None:
    plain = VLLM(tmp_path, training=False)
    try:
        engine = OpenAIEngine(plain.url, training=True, key="")
        with pytest.raises(ConfigError, match="--enable-scale-out"):
            await engine.connect(prompt)
        await engine.disconnect()
        engine = OpenAIEngine(plain.url, key="")
        found = await asked(engine, prompt, Sampling(max_tokens=8, temperature=0.5))
        assert found.logprobs.min() < -CERTAINTY_TOLERANCE
        await engine.disconnect()
    finally:
        plain.kill()
