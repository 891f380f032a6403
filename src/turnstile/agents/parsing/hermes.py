"""Tool calls as JSON between `<tool_call>` tags, the syntax of the Hermes and Qwen families."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from turnstile.types import JSON, Message, ToolCall, ToolSpec

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
_THINK = re.compile(r"\s*(?:<think>)?(.*?)</think>", re.S)


class HermesParser:
    """`<think>reasoning</think>`, then text, then `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Several calls may follow each other. A call whose JSON is broken, or that names a tool which was not offered, makes
    the whole message one without calls, whose content is the text as it is: if the agent asked for two things and one
    is invalid, neither is carried out.
    """

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Message:
        """Return the assistant's message in `text`. Never raises."""
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
        """Return the message's text, as Qwen's own template writes it."""
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
        """Return the tools and how to call them, for templates that do not say it themselves."""
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
    """Return the leading reasoning, with or without its opening tag (the prompt may hold it), and the rest."""
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
