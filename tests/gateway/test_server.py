"""The model server as clients see it: over a real socket, with good and bad requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from modelserver import tiny_engine, tiny_server
from turnstile.engines.remote.endpoint import SESSION_HEADER
from turnstile.errors import ConfigError
from turnstile.gateway import shares


@pytest.fixture
async def client(bytes_: Any) -> AsyncIterator[Any]:
    async with tiny_server(tiny_engine(bytes_)).listening("127.0.0.1", 0) as url, aiohttp.ClientSession() as http:

        async def ask(path: str, **body: Any) -> tuple[int, Any]:
            async with http.request("POST" if body else "GET", f"{url}{path}", json=body or None) as answer:
                return answer.status, await answer.json()

        yield ask


async def test_text_and_ids_are_the_same_prompt(client: Any, bytes_: Any) -> None:
    asked = {"model": "tiny", "max_tokens": 5, "seed": 4, "logprobs": 1, "return_token_ids": True}
    status, by_text = await client("/completions", prompt="Hello", **asked)
    _, by_ids = await client("/completions", prompt=bytes_.encode("Hello"), **asked)
    assert status == 200
    (choice,) = by_text["choices"]
    assert by_ids["choices"] == [choice]
    assert bytes_.decode(choice["token_ids"]) == choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    assert by_text["usage"] == {
        "prompt_tokens": 5, "completion_tokens": len(choice["token_ids"]),
        "total_tokens": 5 + len(choice["token_ids"]),
    }  # fmt: skip
    _, plain = await client("/completions", prompt="Hello", model="tiny", max_tokens=2)
    assert plain["choices"][0].keys() == {"index", "finish_reason", "text", "logprobs"}
    assert plain["choices"][0]["logprobs"] is None


async def test_a_conversation(client: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]
    status, found = await client("/chat/completions", model="tiny", messages=messages, max_completion_tokens=4)
    assert status == 200
    (choice,) = found["choices"]
    assert choice["message"]["role"] == "assistant"
    assert "<|im_end|>" not in choice["message"]["content"]
    assert found["usage"]["completion_tokens"] <= 4


async def test_models_and_health(client: Any) -> None:
    _, found = await client("/models")
    assert [(item["id"], item["max_model_len"]) for item in found["data"]] == [("tiny", 4096)]


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("/completions", {"prompt": [[1], [2]]}, "prompt[0] = [1] is not a whole number"),
        ("/completions", {"prompt": [1, 99999]}, "token 99999 is not in the model's vocabulary"),
        ("/completions", {"prompt": [2**40]}, "prompt[0] = 1099511627776 must be below"),
        ("/completions", {"prompt": "x", "temperature": -1}, "temperature = -1 must be at least 0"),
        ("/completions", {"prompt": "x", "max_tokens": "many"}, "max_tokens = 'many' is not a whole number"),
        ("/completions", {"prompt": "x", "stop": [""]}, "a stop string must not be empty"),
        ("/completions", {"prompt": "x", "n": 0}, "n = 0 must be at least 1"),
        ("/completions", {"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty is not supported"),
        ("/completions", {"max_tokens": 1}, "prompt is missing"),
        ("/completions", {"prompt": "x" * 4096}, "the prompt has 4096 tokens, more than the model's context of 4096"),
        ("/completions", {"prompt": "xx", "max_tokens": 4095}, "which has room for 4094"),
        ("/completions", {"prompt": "x", "structured_outputs": {"regex": "("}}, "sampling.regex cannot be read"),
        ("/chat/completions", {"messages": []}, "messages = [] must be a list of 1"),
        (
            "/chat/completions",
            {"messages": [{"role": "robot", "content": "x"}]},
            "the role 'robot' is unknown",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": 1}]},
            "a content is a text or a list",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tools": [1]},
            "a tool has no name",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
            "tool_choice = 'required' is not known",
        ),
        (
            "/chat/completions",
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "call_1"}]},
            "messages[0]: no message before it calls 'call_1'",
        ),
    ],
)
async def test_bad_request_is_one_clear_line(client: Any, path: str, body: Any, line: str) -> None:
    status, found = await client(path, **{"model": "tiny", **body})
    assert status == 400
    assert line in found["error"]["message"]
    assert "\n" not in found["error"]["message"]


async def test_disconnected_client_leaves_nothing_running(bytes_: Any) -> None:
    inner = tiny_engine(bytes_)
    async with tiny_server(inner).listening("127.0.0.1", 0) as url, aiohttp.ClientSession() as http:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4000, "structured_outputs": {"regex": "a{4000}"}}
        asking = asyncio.ensure_future(http.post(f"{url}/completions", json=body))
        while not inner._running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asking.cancel()
        while inner._running or inner._sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_address_in_use() -> None:
    async with tiny_server().listening("127.0.0.1", 0) as url:
        port = int(url.split(":")[-1].partition("/")[0])
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
            async with tiny_server().listening("127.0.0.1", port):
                pass


async def test_requests_without_a_seed_draw_their_own(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 12}
    texts = {(await client("/completions", **asked))[1]["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 4
    same = {(await client("/completions", **asked, seed=0))[1]["choices"][0]["text"] for _ in range(2)}
    assert len(same) == 1


PATHS = ["/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/weights", "/health"]


@pytest.mark.parametrize(
    ("headers", "line"),
    [
        ({"Origin": "http://evil.example"}, "web pages need a key"),
        ({"Origin": "null"}, "web pages need a key"),
        ({"Sec-Fetch-Site": "cross-site"}, "web pages need a key"),
        ({"Host": "evil.example:8000"}, "host name 'evil.example' needs a key"),
        ({"Host": "127.0.0.1.evil.example"}, "host name '127.0.0.1.evil.example' needs a key"),
    ],
)
async def test_web_pages_are_refused_everywhere(headers: dict[str, str], line: str) -> None:
    async with tiny_server().listening("127.0.0.1", 0) as url, aiohttp.ClientSession() as http:
        for path in PATHS:
            method = "GET" if path in ("/v1/models", "/health") else "POST"
            async with http.request(method, url.removesuffix("/v1") + path, headers=headers, json={}) as answer:
                assert (path, answer.status, line in await answer.text()) == (path, 403, True)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8000", "10.1.2.3", socket.gethostname()])
async def test_own_host_names_are_served(host: str) -> None:
    sent = {"Host": host, "Sec-Fetch-Site": "none"}
    async with (
        tiny_server().listening("127.0.0.1", 0) as url,
        aiohttp.ClientSession() as http,
        http.get(f"{url}/models", headers=sent) as answer,
    ):
        assert answer.status == 200


async def test_key_admits_requests_from_anywhere() -> None:
    sent = {"Host": "gpu.example", "Origin": "http://a.example", "Authorization": "Bearer k"}
    async with (
        tiny_server(token="k").listening("127.0.0.1", 0) as url,
        aiohttp.ClientSession() as http,
        http.get(f"{url}/models", headers=sent) as answer,
    ):
        assert answer.status == 200


async def test_sessions_expire_and_are_limited(bytes_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_SHARES", 3)
    monkeypatch.setattr(shares, "SHARE_SECONDS", 0.2)
    inner = tiny_engine(bytes_)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2, "seed": 1}
    async with tiny_server(inner).listening("127.0.0.1", 0) as url, aiohttp.ClientSession() as http:

        async def ask(session: str) -> str:
            async with http.post(f"{url}/completions", json=body, headers={SESSION_HEADER: session}) as answer:
                return str((await answer.json())["choices"][0]["text"])

        texts = [await ask(f"s{number}") for number in [*range(8), 0]]
        assert len(inner._sessions) <= 3
        assert len(set(texts)) == 1  # one that is forgotten is answered as ever
        while inner._sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await ask("s0") == texts[0]
    assert not inner._sessions
