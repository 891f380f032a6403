"""Chat completions as the unmodified `openai` package sees them: tools, streams, formats, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import openai
import pytest

from modelserver import RESULTS, TWO_CALLS, Script, tiny_engine, tiny_server
from turnstile.types import Message, ToolSpec

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
ASKED: dict[str, Any] = {"role": "user", "content": "What is 2 + 3, and 4 + 5?"}


def call(**arguments: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>"


@asynccontextmanager
async def served(engine: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        tiny_server(engine).listening("127.0.0.1", 0) as url,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
async def client(bytes_: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(tiny_engine(bytes_)) as one:
        yield one


async def test_tool_calls_and_their_results_are_the_prompt_that_our_own_loop_renders() -> None:
    script = Script(f"<think>\nTwo sums.\n</think>\n\nLet me see.\n{call(a=2, b=3)}\n{call(a=4, b=5)}", "5 and 9.")
    async with served(script.engine) as client:
        first = await client.chat.completions.create(model="tiny", messages=[ASKED], tools=[ADD])
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.reasoning_content == "Two sums."
        calls = choice.message.tool_calls or []
        assert [json.loads(one.function.arguments) for one in calls] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
        assert len({one.id for one in calls}) == 2
        answers: list[Any] = [
            {"role": "tool", "tool_call_id": one.id, "content": text} for one, text in zip(calls, "59", strict=True)
        ]
        again = [ASKED, choice.message, *answers]
        second = await client.chat.completions.create(model="tiny", messages=again, tools=[ADD])
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("5 and 9.", "stop")
    messages = [
        Message(role="user", content=str(ASKED["content"])),
        TWO_CALLS,
        *RESULTS,
    ]
    function = ADD["function"]
    tools = [ToolSpec(name="add", description="Add numbers.", schema=function["parameters"])]
    for prompt, shown in zip(script.prompts, (messages[:1], messages), strict=True):
        np.testing.assert_array_equal(prompt, script.renderer.prompt(shown, tools))


async def test_ids_of_calls_repeat_in_no_answer() -> None:
    script = Script(*[call(a=1, b=1)] * 2)
    async with served(script.engine) as client:
        asked: Any = {"model": "tiny", "messages": [ASKED], "tools": [ADD]}
        found = [(await client.chat.completions.create(**asked)).choices[0].message.tool_calls for _ in range(2)]
        assert len({one.id for calls in found for one in calls or []}) == 2


async def test_one_call_alone_and_none() -> None:
    script = Script(*[f"{call(a=1, b=1)}\n{call(a=2, b=2)}"] * 2)
    async with served(script.engine) as client:
        asked: Any = {"model": "tiny", "messages": [ASKED], "tools": [ADD]}
        one = (await client.chat.completions.create(**asked, parallel_tool_calls=False)).choices[0]
        assert [each.function.arguments for each in one.message.tool_calls or []] == ['{"a": 1, "b": 1}']
        none = (await client.chat.completions.create(**asked, tool_choice="none")).choices[0]
        assert (none.message.tool_calls, none.finish_reason) == (None, "stop")
        assert none.message.content == f"{call(a=1, b=1)}\n{call(a=2, b=2)}"


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """What the deltas of a stream add up to, by choice, and the chunks."""
    chunks = [chunk async for chunk in await client.chat.completions.create(model="tiny", stream=True, **asked)]
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            whole = found.setdefault(choice.index, {"content": "", "reasoning_content": "", "tool_calls": []})
            whole["content"] += choice.delta.content or ""
            whole["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            whole["tool_calls"] += [(one.index, one.function.name) for one in choice.delta.tool_calls or ()]
            whole["finish_reason"] = choice.finish_reason
    return found, chunks


async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    script = Script(f"<think>\nHm.\n</think>\n\nLet me see.\n{call(a=2, b=3)}\n{call(a=4, b=5)}")
    async with served(script.engine) as client:
        usage = {"include_usage": True}
        found, chunks = await streamed(client, messages=[ASKED], tools=[ADD], stream_options=usage)
        assert found == {
            0: {
                "content": "Let me see.",
                "reasoning_content": "Hm.",
                "tool_calls": [(0, "add"), (1, "add")],
                "finish_reason": "tool_calls",
            }
        }
        assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens) == ([], len(script.prompts[0]))
        assert len({chunk.id for chunk in chunks}) == 1


async def test_streams_say_what_whole_answers_say(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"messages": [ASKED], "max_tokens": 12, "seed": 7, "n": 3}
    whole = await client.chat.completions.create(model="tiny", **asked)
    found, _ = await streamed(client, **asked)
    assert [found[one.index]["content"] for one in whole.choices] == [one.message.content for one in whole.choices]
    assert len({one.message.content for one in whole.choices}) == 3
    one = await client.chat.completions.create(model="tiny", **{**asked, "n": 1, "seed": 8})
    assert one.choices[0].message.content == whole.choices[1].message.content
    text: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "seed": 3}
    pieces = [chunk.choices[0].text async for chunk in await client.completions.create(**text, stream=True)]
    assert "".join(pieces) == (await client.completions.create(**text)).choices[0].text


async def test_logprobs_and_ids_of_chat_tokens(client: openai.AsyncOpenAI, bytes_: Any) -> None:
    found = await client.chat.completions.create(
        model="tiny", messages=[ASKED], max_tokens=5, logprobs=True, extra_body={"return_token_ids": True}
    )
    (choice,) = found.choices
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    ids: list[int] = choice.token_ids  # type: ignore[attr-defined]
    assert [one.token for one in tokens] == [bytes_.decode([one]) for one in ids]
    assert all(one.logprob < 0 for one in tokens)
    assert len(found.prompt_token_ids) == found.usage.prompt_tokens  # type: ignore[attr-defined, union-attr]


async def test_an_answer_in_the_format_asked_for(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    formats: list[Any] = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    ]
    for form in formats:
        found = await client.chat.completions.create(
            model="tiny", messages=[ASKED], response_format=form, max_tokens=400, seed=1
        )
        if found.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(found.choices[0].message.content or ""), dict)
    assert json.loads(found.choices[0].message.content or "")["n"] in (1, 2)


@pytest.mark.parametrize(
    ("changed", "kind", "code", "line"),
    [
        ({"model": "huge"}, openai.NotFoundError, "not_found", "model 'huge' is not served here; use 'tiny'"),
        ({"max_tokens": 5000}, openai.BadRequestError, "context_length_exceeded", "exceeds the context"),
        ({"temperature": "hot"}, openai.BadRequestError, None, "temperature = 'hot' is not a number"),
        ({"top_logprobs": 3}, openai.BadRequestError, None, "top_logprobs is not supported"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, openai.BadRequestError, None, "cannot be read"),
    ],
)
async def test_errors_are_those_that_the_package_knows(
    client: openai.AsyncOpenAI, changed: dict[str, Any], kind: type[openai.APIStatusError], code: str | None, line: str
) -> None:
    with pytest.raises(kind, match=line) as raised:
        await client.chat.completions.create(**{"model": "tiny", "messages": [ASKED], **changed})
    assert raised.value.code == code


async def test_an_error_in_a_stream_ends_it(client: openai.AsyncOpenAI) -> None:
    wrong = {"structured_outputs": {"regex": "("}}
    stream = await client.chat.completions.create(model="tiny", messages=[ASKED], stream=True, extra_body=wrong)
    with pytest.raises(openai.APIError, match="cannot be read"):
        _ = [chunk async for chunk in stream]


async def test_a_path_that_is_not_served(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings is not served here"):
        await client.embeddings.create(model="tiny", input="x")
    assert [model.id async for model in client.models.list()] == ["tiny"]
