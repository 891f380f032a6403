"""A server whose weights change, over a real socket with real networks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from modelserver import changing_server, given, tiny_engine, tiny_network, tiny_server
from turnstile.engines.remote.openai import OpenAIEngine
from turnstile.errors import ConfigError, EngineError, WeightsLostError
from turnstile.gateway.reload import WeightReloader
from turnstile.types import Completion, Sampling

PROMPT = np.array([7, 8, 9], np.int32)
HOW = Sampling(max_tokens=12, seed=3)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[OpenAIEngine]:
    async with changing_server(tmp_path).listening("127.0.0.1", 0) as url:
        made = OpenAIEngine(url, retries=0, key="", training=True)
        await made.connect(PROMPT)
        yield made
        await made.disconnect()


async def asked(engine: Any, how: Sampling = HOW) -> Completion:
    session = engine.open("g")
    try:
        found: Completion = await engine.generate(PROMPT, how, session)
        return found
    finally:
        engine.close(session)


async def test_samples_use_the_loaded_weights(engine: OpenAIEngine, tmp_path: Path, bytes_: Any) -> None:
    for version in (3, 4):
        await engine.load(given(tmp_path, version))
        far = await asked(engine)
        near = await asked(tiny_engine(bytes_, model=tiny_network(bytes_, seed=version)))
        assert far.token_ids.tolist() == near.token_ids.tolist()
        assert far.logprobs.tolist() == near.logprobs.tolist()  # to the last bit
        assert far.entropies is not None
        assert near.entropies is not None
        assert far.entropies.tolist() == near.entropies.tolist()
        assert far.versions.tolist() == [version] * len(far.token_ids)


async def test_turn_may_span_two_versions(engine: OpenAIEngine, tmp_path: Path) -> None:
    await engine.load(given(tmp_path, 1))
    long = asyncio.ensure_future(asked(engine, Sampling(max_tokens=600, regex="[ab]{600}")))
    others = [await asked(engine) for _ in range(3)]
    await engine.load(given(tmp_path, 2))
    found = await long
    steps = np.diff(found.versions)
    assert (found.versions[0], found.versions[-1], np.count_nonzero(steps)) == (1, 2, 1)
    assert [set(other.versions.tolist()) for other in others] == [{1}] * 3


async def test_failed_load_leaves_unlabelled_weights(engine: OpenAIEngine, tmp_path: Path) -> None:
    good = given(tmp_path, 1)
    await engine.load(good)
    torn = given(tmp_path, 2)
    file = torn.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(EngineError, match="could not be loaded"):
        await engine.load(torn)
    engine.loaded = good
    with pytest.raises(WeightsLostError, match="has lost the weights"):
        await asked(engine)
    await engine.load(good)
    assert set((await asked(engine)).versions.tolist()) == {1}


async def test_only_folders_below_the_root_are_loaded(
    engine: OpenAIEngine, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    elsewhere = given(tmp_path_factory.mktemp("elsewhere"), 1)
    with pytest.raises(ConfigError, match=r"is not below .*, the only place that weights are loaded from"):
        await engine.load(elsewhere)
    link = tmp_path / "link"
    link.symlink_to(elsewhere.folder)
    with pytest.raises(ConfigError, match=r"is not below .*, the only place that weights are loaded from"):
        await engine.load(type(elsewhere)(version=1, folder=link, owner="me", serial=1))


@pytest.mark.parametrize(
    ("headers", "folder", "status", "line"),
    [
        ({"Content-Type": "text/plain"}, "", 400, "must be application/json"),
        (
            {"Content-Type": "application/json", "Origin": "http://127.0.0.1"},
            "",
            403,
            "web pages need a key",
        ),
        ({"Content-Type": "application/json"}, "a\0b", 400, "is not a folder"),
        ({"Content-Type": "application/json"}, "\ud800", 400, "is not a folder"),
        ({"Content-Type": "application/json"}, "", 200, ""),
    ],
)
async def test_rejects_web_pages_and_unnamed_folders(
    tmp_path: Path, headers: dict[str, str], folder: str, status: int, line: str
) -> None:
    weights = given(tmp_path, 1)
    body = json.dumps({"folder": folder or str(weights.folder), "version": weights.label}).encode()
    async with (
        changing_server(tmp_path).listening("127.0.0.1", 0) as url,
        aiohttp.ClientSession() as http,
        http.post(f"{url}/weights", data=body, headers=headers) as answer,
    ):
        assert (answer.status, line in await answer.text()) == (status, True)


async def test_old_labels_are_dropped(bytes_: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnstile.gateway.reload.MAX_LABELS", 2)
    reload = WeightReloader(tiny_engine(bytes_), lambda folder: None, tmp_path)
    for number in range(5):
        await reload.load_folder(str(tmp_path), f"w{number}")
    assert reload.labels == {4: "w3", 5: "w4"}


async def test_server_without_reload_is_rejected(tmp_path: Path) -> None:
    async with tiny_server().listening("127.0.0.1", 0) as url:
        engine = OpenAIEngine(url, retries=0, key="", training=True)
        await engine.connect(PROMPT)
        with pytest.raises(ConfigError, match=r"start turnstile serve with --weights-from"):
            await engine.load(given(tmp_path, 1))
        await engine.disconnect()


async def test_session_cache_is_kept_between_turns(bytes_: Any) -> None:
    inner = tiny_engine(bytes_)
    async with tiny_server(inner).listening("127.0.0.1", 0) as url:
        engine = OpenAIEngine(url, retries=0, key="")
        session = engine.open("g")
        prompt = np.arange(5, 105, dtype=np.int32)
        await engine.connect(prompt[:3])
        first = await engine.generate(prompt, Sampling(max_tokens=4, seed=1), session)
        inner.take_stats()
        longer = np.concatenate([prompt, first.token_ids, np.array([7, 8], np.int32)])
        await engine.generate(longer, Sampling(max_tokens=4, seed=2), session)
        assert inner.take_stats()["tokens_computed"] <= len(longer) - len(prompt) + 4
        await engine.disconnect()
