"""Tool calls as JSON in `<tool_call>` tags, the syntax of the Hermes and Qwen families."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from turnstile.types import JSON, Message, ToolCall, ToolSpec

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
_THINK = re.compile(r"\s*(?:<think>)?(.*?)</think>", re.S)


class HermesParser:
    """Parses reasoning, text and tool calls, in this order, from the model's text.

    The form is `<think>reasoning</think>`, then text, then `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    Several calls may follow each other. If any call has invalid JSON or names a tool that was not offered, the message
    has no calls, and its content is the unchanged text: if the agent asked for two things and one is invalid, neither
    is carried out.
    """

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Message:
        """Return `text` as an assistant's message. Never raises."""
        reasoning, rest = _split_reasoning(text)
        names = {tool.name for tool in tools}
        calls: list[ToolCall] = []
        for index, body in enumerate(_CALL.findall(rest)):
            call = _read(body, index)
            if call is None or call.name not in names:
                return Message(role="assistant", content=rest.strip(), reasoning=reasoning)
            calls.append(call)
        content = _CALL.sub("", rest).strip() if calls else rest.strip()
        return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls))

    def write(self, message: Message, tools: Sequence[ToolSpec]) -> str:
        """Return the message's text in the form of Qwen's own template."""
        parts = [message.content] if message.content else []
        parts += [
            "<tool_call>\n"
            + json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
            + "\n</tool_call>"
            for call in message.tool_calls
        ]
        thought = "" if message.reasoning is None else f"<think>\n{message.reasoning}\n</think>\n\n"
        return thought + "\n".join(parts)

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        """Return a description of the tools and how to call them, for templates that do not give one."""
        specs = "\n".join(
            json.dumps(
                {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": {key: value for key, value in tool.schema.items() if not key.startswith("x-")},
                },
                ensure_ascii=False,
            )
            for tool in tools
        )
        return (
            f"Tools:\n{specs}\n"
            "To call one, write:\n"
            '<tool_call>\n{"name": "the tool", "arguments": {"argument": "value"}}\n</tool_call>'
        )


def _split_reasoning(text: str) -> tuple[str | None, str]:
    """Return the leading reasoning and the rest. The opening tag may be missing, since the prompt may contain it."""
    match = _THINK.match(text)
    return (match[1].strip(), text[match.end() :]) if match else (None, text)


def _read(body: str, index: int) -> ToolCall | None:
    try:
        data: JSON = json.loads(body)
    except (ValueError, RecursionError):  # a model may write anything
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(id=f"call{index:05d}", name=data["name"], arguments=arguments)
