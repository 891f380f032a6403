"""Log-probabilities of given tokens: the engine against a plain forward pass."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from modelserver import tiny_engine, tiny_network
from turnstile.engines.base import ScoringEngine
from turnstile.engines.check import check_engine
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.engines.remote.openai import OpenAIEngine
from turnstile.engines.scripted import ScriptedEngine
from turnstile.errors import ConfigError, EngineError
from turnstile.types import F32, I32, Sampling


def ids(*tokens: int) -> I32:
    return np.array(tokens, np.int32)


@torch.no_grad()
def reference_logprobs(words: Any, prompt: I32, tokens: I32) -> list[float]:
    """Return the log-probabilities from one row, without a cache."""
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
async def test_scores_match_a_plain_forward_pass(deterministic: bool, bytes_: Any) -> None:
    engine = tiny_engine(bytes_, deterministic=deterministic)
    end = int(bytes_.convert_tokens_to_ids("<|im_end|>"))
    prompt, tokens = ids(5, 6, 7, 8), ids(20, end, 21, 22)  # stop tokens may be among scored tokens
    how = Sampling(max_tokens=6, seed=1, temperature=0.5, top_k=3)
    session = engine.open("g")
    found, other, sampled = await asyncio.gather(
        engine.score(prompt, tokens, session),
        score(engine, prompt[:3], tokens[:1]),
        engine.generate(prompt, how, engine.open("g")),
    )
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(reference_logprobs(bytes_, prompt, tokens), abs=1e-4)
    assert other.tolist() == pytest.approx(reference_logprobs(bytes_, prompt[:3], tokens[:1]), abs=1e-4)
    assert engine.take_stats()["tokens_sampled"] == len(sampled.token_ids)
    again = await engine.generate(prompt, how, session)
    assert again.token_ids.tolist() == sampled.token_ids.tolist()  # scoring leaves no trace


async def test_invalid_scores_raise_one_clear_error(bytes_: Any) -> None:
    engine = tiny_engine(bytes_)
    assert (await score(engine, ids(1), ids())).tolist() == []
    for prompt, scored in ((ids(1), ids(2, 99999)), (ids(99999), ids(2))):
        with pytest.raises(ConfigError, match=r"token 99999 is not in the model's vocabulary of \d+ tokens"):
            await score(engine, prompt, scored)
    with pytest.raises(EngineError, match="the prompt is empty"):
        await score(engine, ids(), ids(2))
    with pytest.raises(EngineError, match="session 'gone' is not open"):
        await engine.score(ids(1), ids(2), "gone")


def test_only_the_in_process_engine_can_score(bytes_: Any) -> None:
    assert isinstance(tiny_engine(bytes_), ScoringEngine)
    assert not issubclass(OpenAIEngine, ScoringEngine)
    assert not issubclass(ScriptedEngine, ScoringEngine)


class Vague(TransformersEngine):
    """An engine that scores every token as certain."""

    async def score(self, prompt_ids: I32, token_ids: I32, session: str) -> F32:
        return np.zeros(len(token_ids), np.float32)


async def test_checker_finds_wrong_scores(bytes_: Any) -> None:
    assert await check_engine(tiny_engine(bytes_), [ids(5, 6, 7)]) == []
    vague = Vague(tiny_network(bytes_), bytes_, deterministic=True, max_batch=4, pack_weights=False)
    assert await check_engine(vague, [ids(5, 6, 7)]) == [
        "score gives tokens another log-probability than generate gave them when it sampled them"
    ]
