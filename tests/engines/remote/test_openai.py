"""The engine over the wire, against this project's server with a real network, and against bad servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from modelserver import MODELS, Answer, always, bare_server, in_turn, tiny_engine, tiny_server
from turnstile.agents.renderer_messages import MessagesRenderer
from turnstile.engines.base import Engine
from turnstile.engines.check import check_engine
from turnstile.engines.remote.openai import OpenAIEngine
from turnstile.engines.text_codec import END_ID
from turnstile.errors import ConfigError, EngineError, EngineGoneError, RequestFailedError
from turnstile.types import I32, Message, Sampling

Make = Callable[..., OpenAIEngine]
PROMPT = np.array([7, 8, 9], np.int32)
TALK = MessagesRenderer().prompt([Message(role="user", content="Hello.")], ())


@pytest.fixture
async def connect() -> AsyncIterator[Make]:
    """Make engines with short timeouts, and close them."""
    made: list[OpenAIEngine] = []

    def make(url: str, **knobs: Any) -> OpenAIEngine:
        made.append(OpenAIEngine(url, **{"retries": 0, "key": "", **knobs}))
        made[-1].endpoint._pause = 0.01
        return made[-1]

    yield make
    for engine in made:
        await engine.disconnect()


async def once(engine: Engine, prompt: I32 = PROMPT, sampling: Sampling | None = None) -> Any:
    session = engine.open("g")
    try:
        return await engine.generate(prompt, sampling or Sampling(max_tokens=4), session)
    finally:
        engine.close(session)


async def test_ids_and_logprobs_match_the_engine_behind_the_server(bytes_: Any, connect: Make) -> None:
    inner = tiny_engine(bytes_)
    async with tiny_server(inner).listening("127.0.0.1", 0) as url:
        engine = connect(url, training=True)
        assert isinstance(engine, Engine)
        for how in (Sampling(max_tokens=12, seed=3), Sampling(max_tokens=5, temperature=0.7, top_k=20, seed=2**55)):
            far, near = await once(engine, sampling=how), await once(inner, sampling=how)
            assert far.token_ids.tolist() == near.token_ids.tolist()
            np.testing.assert_allclose(far.logprobs, near.logprobs, rtol=1e-6)
            assert (far.finish, far.sampling, far.token_ids.dtype) == (near.finish, how, np.int32)
        assert (engine.model, engine.context) == ("tiny", 4096)
        assert engine.stats["requests"] == 2
        assert engine.stats["tokens_sampled"] == 17


async def test_passes_check_engine(bytes_: Any, connect: Make) -> None:
    async with tiny_server().listening("127.0.0.1", 0) as url:
        prompts = [np.array(ids, np.int32) for ids in ([5, 6, 7], [9] * 12, [12])]
        problems = await check_engine(connect(url), prompts, decode=lambda ids: str(bytes_.decode(ids.tolist())))
    assert problems == []


async def test_grammar_is_sent_to_the_server(bytes_: Any, connect: Make) -> None:
    pytest.importorskip("llguidance")
    async with tiny_server().listening("127.0.0.1", 0) as url:
        found = await once(connect(url), sampling=Sampling(max_tokens=9, regex="(yes|no)!"))
    said = bytes_.decode(found.token_ids.tolist())
    assert said in ("yes!", "no!")
    assert found.forced.tolist() == [False] + [True] * (len(said) - 1)  # once the first letter is chosen


async def test_text_mode_sends_messages(connect: Make) -> None:
    async with tiny_server().listening("127.0.0.1", 0) as url:
        engine = connect(url, mode="text")
        found = await once(engine, TALK, Sampling(max_tokens=6, seed=1))
        again = await once(engine, TALK, Sampling(max_tokens=6, seed=1))
    assert MessagesRenderer().text(found.token_ids) == MessagesRenderer().text(again.token_ids) != ""
    assert (found.token_ids[-1] == END_ID) == (found.finish == "stop")
    assert found.logprobs.tolist() == [0.0] * len(found.token_ids)


async def test_request_body_of_text_mode(connect: Make) -> None:
    asked: list[Any] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        choice = {"message": {"content": "Hi."}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})

    renderer = MessagesRenderer()
    history = [Message(role="system", content="Be brief."), Message(role="user", content="Hello.")]
    ids = renderer.prompt(history, ())
    said = renderer.completion("Yes?")
    more = renderer.observation(
        history, [Message(role="tool", content="1"), Message(role="user", content="2")], (), said
    )
    async with bare_server({"/v1/models": MODELS, "/v1/chat/completions": chat}) as url:
        found = await once(connect(url, mode="text"), np.concatenate([ids, said, more.ids]), Sampling(temperature=0.0))
    assert renderer.text(found.token_ids) == "Hi."
    assert asked[0] == {
        "model": "m", "max_tokens": 256, "temperature": 0.0, "top_p": 1.0, "seed": 0,
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "1\n\n2"},
        ],
    }  # fmt: skip


def choice(**other: Any) -> dict[str, Any]:
    plain = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [0.0, 0.0]}, "finish_reason": "stop"}
    return {"choices": [plain | other]}


def completions(*answers: Answer) -> dict[str, Answer]:
    return {"/v1/models": MODELS, "/v1/completions": in_turn(*answers)}


async def test_a_server_without_ids_is_refused(connect: Make) -> None:
    for lacking in ({"token_ids": None}, {"logprobs": None}, {"token_ids": [5]}, {"token_ids": ["a", "b"]}):
        async with bare_server(completions(always(choice(**lacking)))) as url:
            with pytest.raises(
                ConfigError, match=r"does not return the ids .* for evaluation set engine.mode = 'text'"
            ):
                await once(connect(url))


async def test_rejects_logprobs_from_before_truncation_for_training(connect: Make) -> None:
    spans = [{"version": "default", "start": 0, "end": 2}]
    raw = always(choice(logprobs={"token_logprobs": [-0.5, -0.25]}, weight_versions=spans))
    async with bare_server(completions(raw)) as url:
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            await once(connect(url, training=True), sampling=Sampling(temperature=0.5))
        engine = connect(url, training=True)
        assert (await once(engine)).logprobs.tolist() == [-0.5, -0.25]  # nothing is cut: both are the same
        assert (await once(connect(url), sampling=Sampling(top_k=5))).finish == "stop"


async def test_rejects_servers_without_weight_labels_for_training(connect: Make) -> None:
    async with bare_server(completions(always(choice()))) as url:
        with pytest.raises(ConfigError, match=r"does not report the weights of each token.* used for turnstile eval"):
            await once(connect(url, training=True))
        assert (await once(connect(url))).finish == "stop"


@pytest.mark.parametrize(
    ("labels", "line"),
    [(None, "does not report the weights of each token"), ("us/1/1", "sampled with weights 'us/1/1', which it was")],
)
async def test_rejects_tokens_of_unknown_weights(connect: Make, labels: str | None, line: str) -> None:
    """The first response, which decides about the server, reports its weights; a later one does not."""
    first = always(choice(weight_versions=[{"version": "default", "start": 0, "end": 2}]))
    later = always(choice(weight_versions=labels and [{"version": labels, "start": 0, "end": 2}]))
    for training in (True, False):
        async with bare_server(completions(first, later)) as url:
            engine = connect(url, training=training)
            if training:
                with pytest.raises(EngineError, match=line):
                    await once(engine)
            else:
                assert (await once(engine)).versions.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        (choice(token_ids=[1] * 9, logprobs={"token_logprobs": [0.0] * 9}), "did not return 1 to 4 token ids"),
        (choice(logprobs={"token_logprobs": [0.0, 1.5]}), "log-probability of at most 0 each"),
        (choice(logprobs={"token_logprobs": [0.0, float("nan")]}), "log-probability of at most 0 each"),
        (choice(finish_reason="abort"), "stopped a turn early (finish reason 'abort')"),
        ({"choices": []}, "answered with 0 choices instead of one"),
        (["?"], "does not answer as an OpenAI-compatible server does"),
    ],
)
async def test_unusable_response_is_an_engine_error(connect: Make, bad: Any, line: str) -> None:
    async with bare_server(completions(always(choice()), always(bad))) as url:
        with pytest.raises(EngineError) as caught:
            await once(connect(url))
    assert line in str(caught.value)
    assert not isinstance(caught.value, EngineGoneError)


async def test_busy_server_is_retried_and_counted_once(connect: Make) -> None:
    busy = always({"error": {"message": "too much"}}, status=503)
    limited = always({"error": "slow down"}, status=429, headers={"Retry-After": "0"})
    async with bare_server(completions(always(choice()), busy, limited, always(choice()))) as url:
        engine = connect(url, retries=2)
        assert (await once(engine)).token_ids.tolist() == [5, 6]
    assert {name: engine.stats[name] for name in ("requests", "tokens_asked", "tokens_sampled")} == {
        "requests": 1, "tokens_asked": 3, "tokens_sampled": 2,
    }  # fmt: skip


async def test_retries_end(connect: Make) -> None:
    async with bare_server(
        completions(always(choice()), always({"error": {"message": "too much"}}, status=503))
    ) as url:
        with pytest.raises(RequestFailedError, match=r"cannot answer now \(503: too much\)"):
            await once(connect(url, retries=2))


async def test_dead_server_is_an_infrastructure_error(connect: Make) -> None:
    async with bare_server(completions(always(choice()))) as url:
        engine = connect(url, retries=1)
        await once(engine)
    for one in (engine, connect(url)):
        with pytest.raises(
            EngineGoneError, match=r"the server at http://127.0.0.1:\d+/v1 does not answer .*is it running"
        ):
            await once(one)
        assert not await one.healthy()


async def test_concurrent_requests_probe_a_dead_server_once(connect: Make) -> None:
    async with bare_server({}) as url:
        pass
    engine = connect(url, retries=1)
    asked = 0
    plain = engine.endpoint._request_once

    async def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return await plain(*arguments)

    engine.endpoint._request_once = counted  # type: ignore[method-assign]
    found = await asyncio.gather(*(once(engine) for _ in range(9)), return_exceptions=True)
    assert [type(error) for error in found] == [EngineGoneError] * 9
    assert asked == 2


async def test_hanging_server_times_out(connect: Make) -> None:
    sent = 0

    async def hang(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        sent += 1
        await asyncio.sleep(3600)
        return web.Response()

    async with bare_server(completions(always(choice()), hang)) as url:
        with pytest.raises(RequestFailedError, match=r"did not answer a request within 0\.3 s; give it more"):
            await once(connect(url, timeout=0.3, retries=3))
    assert sent == 1  # it would take as long again


async def test_concurrency_is_limited(connect: Make) -> None:
    most = now = 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        return web.json_response(choice())

    async with bare_server({"/v1/models": MODELS, "/v1/completions": slow}) as url:
        engine = connect(url, concurrent=3)
        await asyncio.gather(*(once(engine) for _ in range(10)))
    assert most == 3
    assert engine.stats["requests"] == 10


async def test_models_and_keys(connect: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tiny_server(token="secret").listening("127.0.0.1", 0) as url:
        with pytest.raises(
            ConfigError, match=r"does not take a request without a key .*name the variable in engine.key"
        ):
            await once(connect(url))
        monkeypatch.setenv("TINY_KEY", "wrong")
        with pytest.raises(ConfigError, match="does not take what is in TINY_KEY"):
            await once(connect(url, key="TINY_KEY"))
        monkeypatch.setenv("TINY_KEY", "secret")
        assert (await once(connect(url, key="TINY_KEY"))).finish in ("stop", "length")
        with pytest.raises(ConfigError, match=r"'tny' is none of the 1 models at .*did you mean 'tiny'"):
            await once(connect(url, key="TINY_KEY", model="tny"))
    two = always({"data": [{"id": "a"}, {"id": "b"}]})
    async with bare_server({"/v1/models": two}) as url:
        with pytest.raises(ConfigError, match=r"engine.model must name one of the 2 models .*known: a, b"):
            await once(connect(url))
        with pytest.raises(ConfigError, match="the address ends in /v1 as a rule"):
            await once(connect(url.removesuffix("/v1")))


async def test_bad_knobs_and_requests(connect: Make) -> None:
    for knobs, line in (
        ({"url": "localhost:8000"}, "is not a URL"),
        ({"url": "http://x/v1", "mode": "txt"}, "did you mean 'text'"),
        ({"url": "http://x/v1", "mode": "text", "training": True}, "training needs ids"),
        ({"url": "http://x/v1", "concurrent": 0}, "concurrent >= 1"),
    ):
        with pytest.raises(ConfigError, match=line):
            OpenAIEngine(**knobs)
    async with bare_server({"/v1/models": MODELS}) as url:
        engine = connect(url, mode="text")
        with pytest.raises(ConfigError, match="a tokenizer's ids instead of encoded messages"):
            await once(engine, PROMPT)
        with pytest.raises(EngineError, match="prompt is empty"):
            await once(engine, PROMPT[:0])
        session = engine.open("g")
        engine.close(session)
        with pytest.raises(EngineError, match="is not open"):
            await engine.generate(TALK, Sampling(), session)
