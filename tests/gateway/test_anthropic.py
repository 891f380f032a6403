"""Anthropic's Messages as the unmodified `anthropic` package sees them: tools, streams, counts, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import numpy as np
import pytest

from modelserver import RESULTS, TWO_CALLS, Script, tiny_engine, tiny_server
from turnstile.types import Message, ToolSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"name": "add", "description": "Add numbers.", "input_schema": SCHEMA}
ASKED: Any = {"role": "user", "content": [{"type": "text", "text": "What is 2 + 3, and 4 + 5?"}]}
SAID = (
    "<think>\nTwo sums.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 4, "b": 5}}\n</tool_call>'
)


@asynccontextmanager
async def served(engine: Any, **more: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        tiny_server(engine, **more).listening("127.0.0.1", 0) as url,
        anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="k", max_retries=0) as client,
    ):
        yield client


async def test_tool_calls_and_their_results_are_the_prompt_that_our_own_loop_renders() -> None:
    script = Script(SAID, "5 and 9.")
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 900, "system": "Be brief.", "tools": [ADD]}
    async with served(script.engine) as client:
        first = await client.messages.create(messages=[ASKED], **asked)
        assert (first.stop_reason, first.usage.input_tokens) == ("tool_use", len(script.prompts[0]))
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        calls = [block for block in first.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "5"},
            {"type": "tool_result", "tool_use_id": calls[1].id, "content": [{"type": "text", "text": "9"}]},
            {"type": "text", "text": "Go on."},
        ]
        talk: Any = [ASKED, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        counted = await client.messages.count_tokens(model="tiny", messages=talk, system="Be brief.", tools=[ADD])
        second = await client.messages.create(messages=talk, **asked)
        assert (second.content[0].text, second.stop_reason) == ("5 and 9.", "end_turn")  # type: ignore[union-attr]
    messages = [
        Message(role="system", content="Be brief."),
        Message(role="user", content="What is 2 + 3, and 4 + 5?"),
        TWO_CALLS,
        *RESULTS,
        Message(role="user", content="Go on."),
    ]
    tools = [ToolSpec(name="add", description="Add numbers.", schema=SCHEMA)]
    for prompt, shown in zip(script.prompts, (messages[:2], messages), strict=True):
        np.testing.assert_array_equal(prompt, script.renderer.prompt(shown, tools))
    assert counted.input_tokens == len(script.prompts[1])


async def test_a_stream_adds_up_to_the_whole_answer() -> None:
    script = Script(SAID, SAID)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 900, "messages": [ASKED], "tools": [ADD]}
    async with served(script.engine) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
    ids = {"id": ""}
    assert [{**block.to_dict(), **ids} for block in final.content] == [{**x.to_dict(), **ids} for x in whole.content]
    assert "".join(texts) == "Let me see."
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


async def test_choice_of_tools() -> None:
    script = Script(SAID, SAID)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 900, "messages": [ASKED], "tools": [ADD]}
    async with served(script.engine) as client:
        one = await client.messages.create(**asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]
        none = await client.messages.create(**asked, tool_choice={"type": "none"})
        assert [block.type for block in none.content] == ["thinking", "text"]
        assert "<tool_call>" in none.content[1].text  # type: ignore[union-attr]


async def test_the_limit_of_tokens_ends_a_turn(bytes_: Any) -> None:
    async with served(tiny_engine(bytes_)) as client:
        found = await client.messages.create(model="tiny", max_tokens=1, messages=[ASKED], stop_sequences=["\n"])
    assert found.stop_reason in ("max_tokens", "end_turn")
    assert found.usage.output_tokens == 1


@pytest.mark.parametrize(
    ("changed", "kind", "line"),
    [
        ({"model": "huge"}, anthropic.NotFoundError, "model 'huge' is not served here"),
        ({"max_tokens": 5000}, anthropic.BadRequestError, "max_tokens = 5000 exceeds the context"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens = 0 must be at least 1"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "with an input_schema"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "tool_choice.type = 'any' is not known"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError, "type 'image'"),
        ({"messages": [{"role": "system", "content": "x"}]}, anthropic.BadRequestError, "the role 'system' is unknown"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}]},
            anthropic.BadRequestError,
            r"messages\[0\]: no message before it calls 'toolu_1'",
        ),
    ],
)
async def test_errors_are_those_that_the_package_knows(
    bytes_: Any, changed: dict[str, Any], kind: type[anthropic.APIStatusError], line: str
) -> None:
    async with served(tiny_engine(bytes_)) as client:
        with pytest.raises(kind, match=line) as raised:
            await client.messages.create(**{"model": "tiny", "max_tokens": 5, "messages": [ASKED], **changed})
    body: Any = raised.value.body
    assert body["type"] == "error"


async def test_the_key_may_come_as_this_package_sends_it(bytes_: Any) -> None:
    engine = tiny_engine(bytes_)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "messages": [ASKED]}
    async with served(engine, token="k") as client:
        assert (await client.messages.create(**asked)).usage.output_tokens <= 2
    async with served(engine, token="other") as client:
        with pytest.raises(anthropic.AuthenticationError, match="the key is missing or wrong"):
            await client.messages.create(**asked)


async def test_an_unexpected_error_is_an_answer_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()  # it has nothing to say, which is an IndexError
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 900, "messages": [ASKED]}
    async with served(script.engine) as client:
        with pytest.raises(anthropic.InternalServerError, match="an error in the server; its log has the traceback"):
            await client.messages.create(**asked)
        with pytest.raises(anthropic.APIStatusError, match="an error in the server"):
            async with client.messages.stream(**asked) as stream:
                await stream.get_final_message()
    assert caplog.text.count("IndexError") == 2
