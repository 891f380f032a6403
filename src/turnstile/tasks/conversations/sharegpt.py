"""ShareGPT's format and its variants.

Columns: conversations, a list of {from, value}; optional: system (a text), tools (a list, or a list as JSON text).
Calls are entries from `function_call`, whose value is {"name", "arguments"} or a list of these (LLaMA-Factory), or are
in the assistant's text in <tool_call> tags (Hermes). Results are entries from `observation`, `function_response` or
`tool`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turnstile.agents.parsing.hermes import HermesParser
from turnstile.errors import TaskError
from turnstile.tasks.conversations import chat
from turnstile.tasks.conversations.conversation import Conversation, FlaggedMessage, assemble
from turnstile.types import Message, Role, ToolSpec

_ROLES: Mapping[str, Role] = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant", "bot": "assistant", "function_call": "assistant",
    "observation": "tool", "function_response": "tool", "tool": "tool",
}  # fmt: skip
_RESPONSE = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.S)


def from_row(row: Mapping[str, Any], where: str) -> Conversation:
    """Return a row as a conversation. Raises TaskError saying what is wrong with it.

    Tools that the system message already lists in <tools> tags are not offered again, and the text that calls them
    stays text.
    """
    entries = chat.as_list(row.get("conversations", row.get("conversation")), "conversations", where)
    if row.get("system"):
        entries = [{"from": "system", "value": row["system"]}, *entries]
    as_list = any(_speaker(item) == "system" and "<tools>" in str(_value(item)) for item in entries)
    tools = () if as_list else chat.tools_of(row.get("tools"), where)
    flagged = [
        _flagged_message(item, tools, f"{where}, message {number}") for number, item in enumerate(entries, start=1)
    ]
    return replace(assemble(flagged, tools), **chat.metadata_of(row, where))


def _flagged_message(item: Any, tools: tuple[ToolSpec, ...], where: str) -> FlaggedMessage:
    if not isinstance(item, Mapping):
        raise TaskError(f"{where}: an entry is an object with from and value, this is {type(item).__name__}")
    speaker = _speaker(item)
    role = _ROLES.get(speaker)
    if role is None:
        raise TaskError(f"{where}: the speaker {speaker!r} is unknown; known: {', '.join(_ROLES)}")
    text = chat.text_of(_value(item), where)
    if speaker == "function_call":
        calls = chat.calls_of(_functions(text, where), where)
        return Message(role="assistant", tool_calls=calls), chat.is_trainable(item, where)
    if role == "assistant":
        called = HermesParser().parse(text, tools)
        return called if called.tool_calls else chat.assistant_message(text), chat.is_trainable(item, where)
    if role == "tool" and (inner := _RESPONSE.fullmatch(text)):
        text = inner[1]
    return Message(role=role, content=text), False


def _speaker(item: Any) -> str:
    return str(item.get("from", item.get("role"))) if isinstance(item, Mapping) else ""


def _value(item: Any) -> Any:
    return item.get("value", item.get("content")) if isinstance(item, Mapping) else None


def _functions(text: str, where: str) -> list[dict[str, Any]]:
    """Return the calls in the text of a `function_call`, wrapped as in a chat message."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: the value of a function_call is not JSON ({error.msg})") from error
    return [{"function": function} for function in (value if isinstance(value, list) else [value])]
