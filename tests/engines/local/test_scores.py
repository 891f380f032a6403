"""How likely given tokens are: the engine's word against a plain forward pass."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from modelserver import tiny_engine, tiny_network
from turnstile.engines.base import Scores
from turnstile.engines.check import check_engine
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.engines.remote.openai import OpenAIEngine
from turnstile.engines.scripted import ScriptedEngine
from turnstile.errors import ConfigError, EngineError
from turnstile.types import F32, I32, Sampling


def ids(*tokens: int) -> I32:
    return np.array(tokens, np.int32)


@torch.no_grad()
def plainly(words: Any, prompt: I32, tokens: I32) -> list[float]:
    """The same from one row, without a cache."""
    row = torch.from_numpy(np.concatenate([prompt, tokens])).long()
    logprobs = tiny_network(words)(row[None]).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    return [float(line[token]) for line, token in zip(logprobs, tokens.tolist(), strict=True)]


async def score(engine: TransformersEngine, prompt: I32, tokens: I32) -> F32:
    session = engine.open("g")
    try:
        return await engine.score(prompt, tokens, session)
    finally:
        engine.close(session)


@pytest.mark.parametrize("deterministic", [True, False])
async def test_it_is_the_models_own_word(deterministic: bool, bytes_: Any) -> None:
    engine = tiny_engine(bytes_, deterministic=deterministic)
    end = int(bytes_.convert_tokens_to_ids("<|im_end|>"))
    prompt, tokens = ids(5, 6, 7, 8), ids(20, end, 21, 22)  # what ends a turn may stand amid them
    how = Sampling(max_tokens=6, seed=1, temperature=0.5, top_k=3)
    session = engine.open("g")
    found, other, sampled = await asyncio.gather(
        engine.score(prompt, tokens, session),
        score(engine, prompt[:3], tokens[:1]),
        engine.generate(prompt, how, engine.open("g")),
    )
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(plainly(bytes_, prompt, tokens), abs=1e-4)
    assert other.tolist() == pytest.approx(plainly(bytes_, prompt[:3], tokens[:1]), abs=1e-4)
    assert engine.take_stats()["tokens_sampled"] == len(sampled.token_ids)
    again = await engine.generate(prompt, how, session)
    assert again.token_ids.tolist() == sampled.token_ids.tolist()  # nothing of what was asked after is left


async def test_what_cannot_be_asked_is_one_clear_error(bytes_: Any) -> None:
    engine = tiny_engine(bytes_)
    assert (await score(engine, ids(1), ids())).tolist() == []
    for prompt, asked in ((ids(1), ids(2, 99999)), (ids(99999), ids(2))):
        with pytest.raises(ConfigError, match=r"the model has \d+ tokens, and 99999 is none of them"):
            await score(engine, prompt, asked)
    with pytest.raises(EngineError, match="the prompt is empty"):
        await score(engine, ids(), ids(2))
    with pytest.raises(EngineError, match="session 'gone' is not open"):
        await engine.score(ids(1), ids(2), "gone")


def test_not_every_engine_can_tell(bytes_: Any) -> None:
    assert isinstance(tiny_engine(bytes_), Scores)
    assert not issubclass(OpenAIEngine, Scores)
    assert not issubclass(ScriptedEngine, Scores)


class Vague(TransformersEngine):
    """Says of every token that it is certain."""

    async def score(self, prompt_ids: I32, token_ids: I32, session: str) -> F32:
        return np.zeros(len(token_ids), np.float32)


async def test_the_checker_finds_an_engine_that_does_not_know_its_own_tokens(bytes_: Any) -> None:
    assert await check_engine(tiny_engine(bytes_), [ids(5, 6, 7)]) == []
    vague = Vague(tiny_network(bytes_), bytes_, deterministic=True, max_batch=4, pack_weights=False)
    assert await check_engine(vague, [ids(5, 6, 7)]) == [
        "score gives tokens another log-probability than generate gave them when it sampled them"
    ]
