"""Tool calls as JSON in tags."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnstile.agents.parsing.hermes import HermesParser
from turnstile.swe.envs.swe import TOOLS
from turnstile.types import Message, ToolCall

PARSER = HermesParser()


def call(index: int, name: str, **arguments: object) -> ToolCall:
    return ToolCall(id=f"call{index:05d}", name=name, arguments=arguments)


def tagged(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_reads_reasoning_text_and_several_calls():
    text = f"<think>\nLook first.\n</think>\n\nI look.\n{tagged('view')}\n{tagged('fix', old='a', new='b')}\n"
    assert PARSER.parse(text, TOOLS) == Message(
        role="assistant",
        content="I look.",
        reasoning="Look first.",
        tool_calls=(call(0, "view"), call(1, "fix", old="a", new="b")),
    )


def test_reads_reasoning_that_the_prompt_opened():
    message = PARSER.parse(f"Look first.</think>{tagged('view')}", TOOLS)
    assert (message.reasoning, message.content, message.tool_calls) == ("Look first.", "", (call(0, "view"),))


def test_reads_a_call_without_arguments():
    assert PARSER.parse('<tool_call>{"name": "run"}</tool_call>', TOOLS).tool_calls == (call(0, "run"),)


@pytest.mark.parametrize(
    "body",
    ['{"name": "view", "arguments": {}', "view", '["view"]', '{"name": 3}', '{"name": "view", "arguments": "x"}',
     '{"name": "no_such_tool", "arguments": {}}', "{}", "", "[" * 20_000],
)  # fmt: skip
def test_one_broken_call_makes_the_message_one_without_calls(body):
    text = f"{tagged('view')}\n<tool_call>{body}</tool_call>"
    message = PARSER.parse(text, TOOLS)
    assert message.tool_calls == ()
    assert message.content == text.strip()


@pytest.mark.parametrize("text", ["", "hello", "<tool_call>", "<tool_call>{", "</tool_call><tool_call>", "<think>hm"])
def test_text_without_calls_is_content(text):
    assert PARSER.parse(text, TOOLS) == Message(role="assistant", content=text)


plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=20).map(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | plain, lambda inner: st.lists(inner) | st.dictionaries(plain, inner)
)
calls = st.lists(
    st.tuples(st.sampled_from([tool.name for tool in TOOLS]), st.dictionaries(plain, values, max_size=3)), max_size=3
)


@given(content=plain, reasoning=st.none() | plain, given_calls=calls)
@settings(max_examples=60, deadline=None)
def test_parse_is_the_inverse_of_write(content, reasoning, given_calls):
    made = tuple(ToolCall(id=f"call{i:05d}", name=n, arguments=a) for i, (n, a) in enumerate(given_calls))
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=made)
    assert PARSER.parse(PARSER.write(message, TOOLS), TOOLS) == message


@given(st.text())
def test_never_raises(text):
    PARSER.parse(text, TOOLS)
    PARSER.parse(f"<tool_call>{text}</tool_call>", TOOLS)


def test_instructions_show_the_tools_without_private_keys():
    text = PARSER.instructions(TOOLS)
    assert '"name": "fix"' in text
    assert "x-line" not in text
    assert "<tool_call>" in text
