"""The scripted engine, and the checker of engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers import tiny_llama
from turnstile.agents.renderer import LinesRenderer
from turnstile.engines.base import Engine
from turnstile.engines.check import check_engine
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.engines.scripted import ScriptedEngine
from turnstile.errors import EngineError
from turnstile.types import I32, Completion, Sampling


def ids(*values: int) -> I32:
    return np.asarray(values, dtype=np.int32)


@pytest.fixture
def engine(bytes_):
    script = ["view", "fix a -> b", "submit"]
    return ScriptedEngine(LinesRenderer(bytes_), lambda session, turn, prompt: script[turn])


def sample(n: int = 64) -> Sampling:
    return Sampling(max_tokens=n)


async def test_returns_the_policys_texts_with_logprob_zero(engine, bytes_):
    assert isinstance(engine, Engine)
    session = engine.open("g")
    found = await engine.generate(ids(1), sample(), session)
    assert bytes_.decode(found.token_ids.tolist()) == "view\n"
    assert found.finish == "stop"
    assert found.logprobs.tolist() == [0.0] * 5
    assert found.logprobs.dtype == np.float32
    assert found.versions.tolist() == [0] * 5


async def test_turns_count_by_session(engine):
    one, two = engine.open("g"), engine.open("g")
    assert one != two
    texts = [
        engine._writer.text((await engine.generate(ids(*prompt), sample(), session)).token_ids)
        for session, prompt in ((one, [1]), (one, [1, 2]), (two, [1]), (one, [1, 2, 3]), (two, [1, 9]))
    ]
    assert texts == ["view", "fix a -> b", "view", "submit", "fix a -> b"]


async def test_replayed_attempt_starts_at_turn_0(engine):
    session = engine.open("g")
    for prompt in (ids(1), ids(1, 2)):
        await engine.generate(prompt, sample(), session)
    again = await engine.generate(ids(1), sample(), session)
    assert engine._writer.text(again.token_ids) == "view"


async def test_token_limit_cuts_the_text(engine):
    found = await engine.generate(ids(1), sample(3), engine.open("g"))
    assert engine._writer.text(found.token_ids) == "vie"
    assert found.finish == "length"


async def test_refuses_closed_sessions_and_empty_prompts(engine):
    session = engine.open("g")
    with pytest.raises(EngineError, match="empty"):
        await engine.generate(ids(), sample(), session)
    engine.close(session)
    with pytest.raises(EngineError, match="is not open"):
        await engine.generate(ids(1), sample(), session)


async def test_passes_check_engine(bytes_):
    engine = ScriptedEngine(LinesRenderer(bytes_), lambda session, turn, prompt: f"guess {int(prompt.sum()) % 7}")
    assert await check_engine(engine, [ids(1, 2), ids(3)], max_tokens=9) == []


# The checker against an engine that samples, and against broken ones


@pytest.fixture(scope="module")
def sampler(words):
    return TransformersEngine(tiny_llama(len(words)), words, deterministic=True)


PROMPTS = [ids(5, 6, 7), ids(5, 6), ids(9, 9, 9, 9, 4), ids(12)]


class Around:
    """An engine around another one, broken in one place."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.calls = 0

    def open(self, share: str) -> str:
        return self.inner.open(share)

    def close(self, session: str) -> None:
        self.inner.close(session)

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        self.calls += 1
        return await self.inner.generate(prompt_ids, sampling, session)


class Positive(Around):
    async def generate(self, prompt_ids, sampling, session):
        found = await super().generate(prompt_ids, sampling, session)
        return replace(found, logprobs=-found.logprobs)


class NoSeed(Around):
    async def generate(self, prompt_ids, sampling, session):
        return await super().generate(prompt_ids, replace(sampling, seed=self.calls), session)


class NoTruncation(Around):
    async def generate(self, prompt_ids, sampling, session):
        return await super().generate(prompt_ids, replace(sampling, top_k=0), session)


class NoLimit(Around):
    async def generate(self, prompt_ids, sampling, session):
        return await super().generate(prompt_ids, replace(sampling, max_tokens=20), session)


class NoStop(Around):
    async def generate(self, prompt_ids, sampling, session):
        return await super().generate(prompt_ids, replace(sampling, stop=()), session)


class OneTalk(Around):
    async def generate(self, prompt_ids, sampling, session):
        self.first = getattr(self, "first", {})
        return await super().generate(self.first.setdefault(session, prompt_ids), sampling, session)


class Undying(Around):
    def open(self, share):
        self.session = getattr(self, "session", None) or super().open(share)
        return self.session

    def close(self, session):
        pass


async def test_checker_accepts_a_correct_engine(sampler, words):
    decode = lambda tokens: words.decode(tokens.tolist())  # noqa: E731
    assert await check_engine(sampler, PROMPTS, decode=decode) == []


@pytest.mark.parametrize(
    ("broken", "finding"),
    [
        (Positive, "log-probabilities must be finite and at most 0"),
        (NoSeed, "the same prompt and seed gave another completion"),
        (NoTruncation, "with top_k = 1 the log-probabilities are not 0"),
        (NoLimit, "exceeds max_tokens"),
        (NoLimit, "with max_tokens = 1 there are"),
        (NoStop, "must end the turn behind the token that holds it"),
        (OneTalk, "a session's second turn differs"),
        (Undying, "generate in a closed session must raise EngineError"),
    ],
)
async def test_checker_finds_problems(sampler, words, broken, finding):
    problems = await check_engine(broken(sampler), PROMPTS, decode=lambda tokens: words.decode(tokens.tolist()))
    assert any(finding in problem for problem in problems), problems
