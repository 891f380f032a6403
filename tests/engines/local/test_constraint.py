"""Constrained turns match their constraint, whatever the model prefers."""

from __future__ import annotations

import asyncio
import builtins
import re
from typing import Any

import numpy as np
import pytest
import torch

from helpers import tiny_llama
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.errors import ConfigError, MissingExtraError
from turnstile.models.head import project
from turnstile.types import Completion, Sampling

PROMPT = np.array([40, 41, 42], np.int32)


@pytest.fixture
def engine(bytes_: Any) -> TransformersEngine:
    return TransformersEngine(tiny_llama(len(bytes_)), bytes_, stop_ids=[bytes_.eos_token_id])


async def say(engine: TransformersEngine, how: Sampling, prompt: np.ndarray = PROMPT) -> Completion:
    session = engine.open("g")
    try:
        return await engine.generate(prompt, how, session)
    finally:
        engine.close(session)


def text(engine: TransformersEngine, found: Completion) -> str:
    return str(engine._tokenizer.decode(found.token_ids.tolist(), skip_special_tokens=True))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize(
    "rule", [{"regex": "guess (1[0-5]|[1-9])"}, {"grammar": 'start: "guess " ("1" /[0-5]/ | /[1-9]/)'}]
)
async def test_every_turn_matches(engine: TransformersEngine, rule: dict[str, str], temperature: float) -> None:
    ways = [Sampling(max_tokens=20, seed=seed, temperature=temperature, **rule) for seed in range(12)]
    found = await asyncio.gather(*(say(engine, how) for how in ways))
    said = {text(engine, one) for one in found}
    assert all(re.fullmatch("guess (1[0-5]|[1-9])", one) for one in said), said
    assert (len(said) > 1) == (temperature > 0)
    assert {one.finish for one in found} == {"stop"}


async def test_other_requests_of_the_batch_are_unconstrained(engine: TransformersEngine) -> None:
    free = Sampling(max_tokens=8, seed=3)
    alone = await say(engine, free)
    bound, beside = await asyncio.gather(say(engine, Sampling(max_tokens=8, seed=3, regex="a+b")), say(engine, free))
    assert beside.token_ids.tolist() == alone.token_ids.tolist()
    assert re.fullmatch("a+b?", text(engine, bound))


async def test_logprobs_ignore_the_constraint(engine: TransformersEngine, bytes_: Any) -> None:
    """They equal the trainer's, which knows no constraint."""
    found = await say(engine, Sampling(max_tokens=8, seed=1, temperature=0.7, regex="[a-f]{6}"))
    model = tiny_llama(len(bytes_))
    row = torch.from_numpy(np.concatenate([PROMPT, found.token_ids])).long()[None]
    with torch.no_grad():
        logits = project(model, model.get_decoder()(row).last_hidden_state[0, len(PROMPT) - 1 : -1])
    expected = (logits / 0.7).log_softmax(dim=-1).gather(1, row[0, len(PROMPT) :, None])[:, 0]
    np.testing.assert_allclose(found.logprobs, expected.numpy(), atol=1e-5)
    assert found.logprobs.sum() < -10  # nothing here is likely


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"regex": "(a"}, "sampling.regex cannot be read"),
        ({"grammar": "start: nothing"}, "sampling.grammar cannot be read"),
        ({"regex": "a", "grammar": 'start: "a"'}, "are both set; set only one"),
        ({"regex": "a", "top_k": 5}, "cannot be combined with top_k, top_p or min_p"),
    ],
)
async def test_rejects_invalid_constraints(engine: TransformersEngine, rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await say(engine, Sampling(**rule))


async def test_missing_extra_is_named(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "llguidance":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"turnstile-rl\[grammar\]"):
        await say(engine, Sampling(regex="a"))


async def test_forced_tokens_are_marked(engine: TransformersEngine) -> None:
    """`guess ` is forced; the number is a choice, except for the end after 2 to 9."""
    rule = Sampling(max_tokens=20, seed=1, regex="guess (1[0-5]|[2-9])")
    ruled, free = await asyncio.gather(say(engine, rule), say(engine, Sampling(max_tokens=4)))
    said = text(engine, ruled)
    assert ruled.forced is not None
    assert ruled.forced.tolist()[: len("guess ") + 1] == [True] * len("guess ") + [False]
    assert len(ruled.forced) == len(ruled.token_ids)
    assert said.startswith("guess ")
    assert free.forced is None
