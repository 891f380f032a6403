"""Requests to vLLM and SGLang and their responses, with bare servers that answer like the real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from modelserver import Answer, bare_server
from turnstile.engines.remote.openai import OpenAIEngine
from turnstile.engines.remote.weights import PublishedWeights
from turnstile.errors import ConfigError, EngineError, EngineGoneError, WeightsLostError
from turnstile.types import Sampling

PROMPT = np.array([7, 8, 9], np.int32)
HOW = Sampling(max_tokens=4, seed=3, stop=("\n",))
WEIGHTS = PublishedWeights(version=5, folder=Path("/runs/r/weights/000002-5"), owner="me", serial=2, head=False)
OLD, NEW = "me/1/4", "me/2/5"


class Server:
    """A server that records requests and answers by path."""

    def __init__(self, owner: str) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {}
        self.failing: set[str] = set()
        self._owner = owner

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "m", "owned_by": self._owner, "max_model_len": 64}]})

    def _at(self, path: str) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            self.asked.append((request.path_qs, await request.json() if request.can_read_body else None))
            if path in self.failing:
                return web.json_response({"error": {"message": f"{path} failed"}}, status=400)
            return web.json_response(self.answers[path])

        return answer

    def paths(self) -> dict[str, Answer]:
        return {"/v1/models": self._models, **{path: self._at(path) for path in self.answers}}


def generated(ids: list[int], logprobs: list[float], spans: list[tuple[str, int, int]], finish: str = "stop") -> Any:
    """Return a response of vLLM's /inference/v1/generate."""
    content = [{"token_id": i, "logprob": lp, "top_logprobs": []} for i, lp in zip(ids, logprobs, strict=True)]
    versions = [{"version": label, "start": start, "end": end} for label, start, end in spans]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
    return {"request_id": "x", "choices": [{**choice, "weight_versions": versions}]}


def told(tokens: list[list[Any]], label: str, finish: str = "stop") -> Any:
    """Return a response of SGLang's /generate."""
    meta = {"output_token_logprobs": tokens, "weight_version": label, "finish_reason": {"type": finish}}
    return {"text": "", "meta_info": meta}


@pytest.fixture
def vllm() -> Server:
    server = Server("vllm")
    server.answers = {
        "/inference/v1/generate": generated([5, 6], [0.0, 0.0], [(OLD, 0, 1), (NEW, 1, 2)]),
        "/server_info": {"vllm_config": {"device_config": {"device": "cpu"}}},
        "/is_paused": {"is_paused": False},
        "/pause": {"status": "paused"},
        "/collective_rpc": {"results": [None]},
        "/reset_prefix_cache": {"success": True},
        "/update_weight_version": {"success": True},
        "/resume": {"status": "resumed"},
    }
    return server


@pytest.fixture
def sglang() -> Server:
    server = Server("sglang")
    server.answers = {
        "/generate": told([[0.0, 5, None], [0.0, 6, None]], NEW),
        "/update_weights_from_disk": {"success": True, "message": "", "num_paused_requests": 0},
    }
    return server


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], OpenAIEngine]]:
    made: list[OpenAIEngine] = []

    def make(url: str) -> OpenAIEngine:
        made.append(OpenAIEngine(url, retries=0, key="", training=True))
        return made[-1]

    yield make
    for engine in made:
        await engine.disconnect()


async def met(engine: OpenAIEngine, loaded: PublishedWeights | None = None) -> str:
    await engine.connect(PROMPT)
    engine.loaded = loaded
    return engine.open("g")


async def test_vllm_takes_ids_and_labels_each_token(vllm: Server, connect: Any) -> None:
    async with bare_server(vllm.paths()) as url:
        engine = connect(url)
        session = await met(engine, PublishedWeights(version=4, folder=Path(), owner="me", serial=1))
        vllm.answers["/inference/v1/generate"] = generated([5, 6], [-1.5, -0.25], [(OLD, 0, 1), (NEW, 1, 2)], "length")
        found = await engine.generate(PROMPT, HOW, session)
    path, asked = vllm.asked[-1]
    assert path == "/inference/v1/generate"
    assert asked == {
        "model": "m",
        "token_ids": [7, 8, 9],
        "sampling_params": {
            "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 3, "stop": ["\n"],
            "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 0,
        },
    }  # fmt: skip
    assert (found.token_ids.tolist(), found.logprobs.tolist(), found.finish) == ([5, 6], [-1.5, -0.25], "length")
    assert found.versions.tolist() == [4, 5]
    assert engine.context == 64


async def test_vllm_loads_a_folder_between_two_tokens(vllm: Server, connect: Any) -> None:
    async with bare_server(vllm.paths()) as url:
        engine = connect(url)
        await met(engine)
        vllm.asked.clear()
        await engine.load(WEIGHTS)
        assert engine.loaded == WEIGHTS
    assert vllm.asked == [
        ("/server_info?config_format=json", None),
        ("/pause?mode=keep", {}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(WEIGHTS.folder)}}),
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/update_weight_version", {"new_version": NEW}),
        ("/resume", {}),
    ]


async def test_vllm_on_a_cpu_is_rejected_with_a_tied_head(vllm: Server, connect: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    has_tied_head = replace(WEIGHTS, folder=tmp_path, head=True)
    async with bare_server(vllm.paths()) as url:
        engine = connect(url)
        await met(engine)
        with pytest.raises(ConfigError, match=r"does not reload an output layer .* model.train = 'top' or 'lora'"):
            await engine.load(has_tied_head)
        await engine.load(replace(has_tied_head, head=False))
        (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
        await engine.load(has_tied_head)
        vllm.answers["/server_info"] = {"vllm_config": {"device_config": {"device": "cuda"}}}
        (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
        other = connect(url)
        await met(other)
        await other.load(has_tied_head)


async def test_vllm_resumes_unlabelled_after_a_failed_load(vllm: Server, connect: Any) -> None:
    vllm.failing.add("/collective_rpc")
    async with bare_server(vllm.paths()) as url:
        engine = connect(url)
        await met(engine)
        vllm.asked.clear()
        with pytest.raises(EngineError, match="/collective_rpc failed"):
            await engine.load(WEIGHTS)
        assert engine.loaded is None
    assert vllm.asked[-2:] == [("/update_weight_version", {"new_version": "default"}), ("/resume", {})]


async def test_vllm_left_paused_is_resumed_before_the_first_request(
    vllm: Server, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.answers["/is_paused"] = {"is_paused": True}
    async with bare_server(vllm.paths()) as url:
        await met(connect(url))
        paths = [path for path, _ in vllm.asked]
        assert paths[:4] == ["/is_paused", "/update_weight_version", "/resume", "/inference/v1/generate"]
        assert vllm.asked[1][1] == {"new_version": "default"}
        assert "was left paused by a reload" in caplog.text
        vllm.answers["/is_paused"] = {"is_paused": False}
        vllm.asked.clear()
        await met(connect(url))
        assert [path for path, _ in vllm.asked][:2] == ["/is_paused", "/inference/v1/generate"]
    del vllm.answers["/is_paused"]
    async with bare_server(vllm.paths()) as url:
        with pytest.raises(ConfigError, match="start vLLM with VLLM_SERVER_DEV_MODE=1"):
            await connect(url).connect(PROMPT)


async def test_cancelled_reload_does_not_wait_for_a_hanging_vllm(
    vllm: Server, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile.engines.remote.dialects.vllm.RESUME_TIMEOUT", 0.05)
    reloading = asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        reloading.set()
        await asyncio.Event().wait()
        raise AssertionError

    paths = vllm.paths() | {"/collective_rpc": hang, "/update_weight_version": hang}
    async with bare_server(paths) as url:
        engine = connect(url)
        await met(engine)
        loading = asyncio.ensure_future(engine.load(WEIGHTS))
        await reloading.wait()
        loading.cancel()
        with pytest.raises(EngineGoneError, match=r"did not resume .* after reload"):
            await loading
        assert engine.loaded is None


async def test_vllm_without_training_paths_is_rejected(vllm: Server, connect: Any) -> None:
    del vllm.answers["/server_info"]
    async with bare_server(vllm.paths()) as url:
        engine = connect(url)
        await met(engine)
        with pytest.raises(ConfigError, match="start vLLM with VLLM_SERVER_DEV_MODE=1"):
            await engine.load(WEIGHTS)
    del vllm.answers["/inference/v1/generate"]
    async with bare_server(vllm.paths()) as url:
        with pytest.raises(ConfigError, match="has no /inference/v1/generate"):
            await connect(url).connect(PROMPT)


async def test_evaluation_uses_vllms_completions(connect: Any) -> None:
    server = Server("vllm")
    choice = {"token_ids": [5], "logprobs": {"token_logprobs": [0.0]}, "finish_reason": "stop"}
    server.answers = {"/v1/completions": {"choices": [choice]}}
    async with bare_server(server.paths()) as url:
        engine = OpenAIEngine(url, retries=0, key="")
        found = await engine.generate(PROMPT, HOW, await met(engine))
        await engine.disconnect()
    assert found.token_ids.tolist() == [5]
    asked = server.asked[-1][1]
    assert (asked["top_k"], asked["min_p"]) == (0, 0.0)  # or a model's own defaults would stand


async def test_sglang_takes_ids_and_loads_a_folder(sglang: Server, connect: Any) -> None:
    async with bare_server(sglang.paths()) as url:
        engine = connect(url)
        session = await met(engine)
        await engine.load(WEIGHTS)
        assert sglang.asked[-1] == (
            "/update_weights_from_disk",
            {"model_path": str(WEIGHTS.folder), "weight_version": NEW, "flush_cache": True},
        )
        found = await engine.generate(PROMPT, HOW, session)
        asked = sglang.asked[-1][1]
        assert (asked["input_ids"], asked["return_logprob"]) == ([7, 8, 9], True)
        assert (asked["sampling_params"]["top_k"], asked["sampling_params"]["max_new_tokens"]) == (-1, 4)
        assert (found.token_ids.tolist(), found.versions.tolist(), found.finish) == ([5, 6], [5, 5], "stop")
        sglang.answers["/update_weights_from_disk"] = {"success": False, "message": "no such folder"}
        with pytest.raises(EngineError, match=r"did not load .*no such folder"):
            await engine.load(WEIGHTS)


async def test_sglang_with_logprobs_from_before_truncation(sglang: Server, connect: Any) -> None:
    async with bare_server(sglang.paths()) as url:
        engine = connect(url)
        sglang.answers["/generate"] = told([[-0.7, 5, None]], NEW)
        session = await met(engine, WEIGHTS)
        assert (await engine.generate(PROMPT, HOW, session)).logprobs.tolist() == [np.float32(-0.7)]
        for how, name in ((Sampling(top_k=5), "truncation"), (Sampling(temperature=0.5), "temperature")):
            with pytest.raises(ConfigError, match=f"from before {name}, which training cannot use"):
                await engine.generate(PROMPT, how, session)
        with pytest.raises(ConfigError, match="masked by a regex or a grammar"):
            await engine.generate(PROMPT, Sampling(regex="a"), session)


@pytest.mark.parametrize(
    ("labels", "error", "line"),
    [
        (["default", "default"], WeightsLostError, "was started again and has lost the weights"),
        (["you/2/5", "you/2/5"], ConfigError, "another run gave it; give each run servers of its own"),
        ([OLD, NEW], EngineError, "of version 4, after it was given 5"),
        (["me/3/6"], EngineError, "does not report the weights of each token"),
        (["me/x"] * 2, ConfigError, "another run"),
    ],
)
async def test_tokens_of_other_weights_are_rejected(
    vllm: Server, connect: Any, labels: list[str], error: type[Exception], line: str
) -> None:
    async with bare_server(vllm.paths()) as url:
        engine = connect(url)
        session = await met(engine, WEIGHTS)
        spans = [(label, place, place + 1) for place, label in enumerate(labels)]
        vllm.answers["/inference/v1/generate"] = generated([5, 6], [-1.0, -1.0], spans)
        with pytest.raises(error, match=line):
            await engine.generate(PROMPT, HOW, session)
        assert engine.stats["requests"] == 0
        assert (engine.loaded is None) == (error is WeightsLostError)


@pytest.mark.parametrize(
    "bad",
    [
        {"choices": [{"token_ids": [5], "logprobs": None, "finish_reason": "stop"}]},
        {"choices": [{"token_ids": [5], "logprobs": {"content": [{"token_id": 6, "logprob": 0.0}]}}]},
        generated([5], [0.5], []),
    ],
)
async def test_vllm_response_without_ids_is_rejected(vllm: Server, connect: Any, bad: Any) -> None:
    vllm.answers["/inference/v1/generate"] = bad
    async with bare_server(vllm.paths()) as url:
        with pytest.raises(ConfigError, match="does not return the ids of sampled tokens"):
            await connect(url).connect(PROMPT)
