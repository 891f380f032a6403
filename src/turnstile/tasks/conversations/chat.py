"""Chat messages in OpenAI's format, which is also the format in which this project writes conversations.

Columns: messages (a list, or a list as JSON text), tools (likewise; optional). A message has role, content (a text or a
list of text parts), tool_calls, tool_call_id, reasoning_content or reasoning, and weight or trainable, which say
whether it is to be trained on. Optional columns: id, task_id, resolved, ended, model, patch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from turnstile.errors import TaskError
from turnstile.tasks.conversations.conversation import Conversation, FlaggedMessage, assemble
from turnstile.types import JSON, Message, Role, ToolCall, ToolSpec

_ROLES: Mapping[str, Role] = {**{role: role for role in get_args(Role)}, "developer": "system", "function": "tool"}
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.S)
_TEXTS = ("text", "input_text", "output_text")
_TRAIN_FLAGS = ("weight", "trainable", "train", "training")


def from_row(row: Mapping[str, Any], where: str) -> Conversation:
    """Return a row as a conversation. Raises TaskError saying what is wrong with it."""
    messages = as_list(row.get("messages"), "messages", where)
    flagged = [message_of(item, f"{where}, message {number}") for number, item in enumerate(messages, start=1)]
    conversation = assemble(flagged, tools_of(row.get("tools"), where))
    return replace(conversation, **metadata_of(row, where))


def to_row(conversation: Conversation) -> dict[str, JSON]:
    """Return the conversation as a row; empty fields are omitted."""
    texts = {name: getattr(conversation, name) for name in ("id", "task_id", "ended", "model", "patch")}
    return {
        **{name: text for name, text in texts.items() if text},
        **({} if conversation.resolved is None else {"resolved": conversation.resolved}),
        **({"tools": [_tool(tool) for tool in conversation.tools]} if conversation.tools else {}),
        "messages": [
            _message(message, flag) for message, flag in zip(conversation.messages, conversation.trainable, strict=True)
        ],
    }


def message_of(item: Any, where: str) -> FlaggedMessage:
    """Return one message, and whether it may be trained on. Raises TaskError if it is malformed."""
    if not isinstance(item, Mapping):
        raise TaskError(f"{where}: a message is an object with role and content, this is {type(item).__name__}")
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise TaskError(f"{where}: the role {item.get('role')!r} is unknown; known: {', '.join(_ROLES)}")
    content = text_of(item.get("content"), where)
    if role != "assistant":
        call_ids = item.get("tool_call_ids") or ()
        call_id = item.get("tool_call_id") or next(iter(call_ids), None)
        return Message(role=role, content=content, tool_call_id=call_id if role == "tool" else None), False
    calls = item.get("tool_calls") or ([{"function": item["function_call"]}] if item.get("function_call") else [])
    reasoning = item.get("reasoning_content") or item.get("reasoning") or _thinking(item.get("content"))
    message = assistant_message(content, reasoning)
    return replace(message, tool_calls=calls_of(calls, where)), is_trainable(item, where)


def assistant_message(content: str, reasoning: Any = None) -> Message:
    """Return an assistant's message.

    Its reasoning is `reasoning` if that is a non-empty text, else the text in <think> tags at the beginning of
    `content`.
    """
    if isinstance(reasoning, str) and reasoning:
        return Message(role="assistant", content=content, reasoning=reasoning)
    if match := _THOUGHT.match(content):
        return Message(role="assistant", content=content[match.end() :], reasoning=match[1].strip() or None)
    return Message(role="assistant", content=content)


def text_of(content: Any, where: str) -> str:
    """Return the text of a content, which may be a text, None or a list of text parts. Raises TaskError otherwise."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TaskError(f"{where}: a content is a text or a list of parts, this is {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind in _TEXTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind not in ("thinking", "redacted_thinking"):  # reasoning, which is not part of the text
            raise TaskError(f"{where}: its content has a part of type {kind!r}; only text can be learned")
    return "".join(texts)


def _thinking(content: Any) -> str:
    """Return the reasoning in a content's parts, which is where Anthropic's format has it."""
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return "\n\n".join(str(part["thinking"]) for part in parts if part.get("thinking"))


def calls_of(calls: Any, where: str) -> tuple[ToolCall, ...]:
    """Return tool calls whose arguments are an object or JSON text. Raises TaskError for anything else."""
    result = []
    for call in as_list(calls, "tool_calls", where):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TaskError(f"{where}: a tool call has no function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except json.JSONDecodeError as error:
                raise TaskError(f"{where}: the arguments of {function['name']!r} are not JSON ({error.msg})") from error
        if arguments is not None and not isinstance(arguments, Mapping):
            raise TaskError(f"{where}: the arguments of {function['name']!r} are not an object")
        result.append(ToolCall(id=str(call.get("id") or ""), name=function["name"], arguments=dict(arguments or {})))
    return tuple(result)


def tools_of(tools: Any, where: str) -> tuple[ToolSpec, ...]:
    """Return tools in OpenAI's format, with or without the `function` wrapper. Raises TaskError for anything else."""
    result = []
    for tool in as_list(tools, "tools", where):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise TaskError(f"{where}: a tool has no name")
        schema = inner.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(schema, Mapping):
            raise TaskError(f"{where}: the parameters of the tool {inner['name']!r} are not a JSON schema")
        result.append(ToolSpec(name=inner["name"], description=str(inner.get("description") or ""), schema=schema))
    return tuple(result)


def is_trainable(item: Mapping[str, Any], where: str) -> bool:
    """Return whether a message is to be trained on, by default True. Raises TaskError for an invalid flag."""
    for name in _TRAIN_FLAGS:
        value = item.get(name)
        if value not in (None, 0, 1):
            raise TaskError(f"{where}: {name} is 0 or 1, or true or false, not {value!r}")
        if value is not None and not value:
            return False
    return True


def metadata_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a row that describe the whole conversation. Raises TaskError for an invalid `resolved`."""
    resolved = row.get("resolved")
    if resolved not in (None, 0, 1):
        raise TaskError(f"{where}: resolved is true or false, not {resolved!r}")
    texts = {name: str(row.get(name) or "") for name in ("id", "task_id", "ended", "model", "patch")}
    return {**texts, "resolved": None if resolved is None else bool(resolved)}


def as_list(value: Any, name: str, where: str) -> list[Any]:
    """Return a value as a list; it may be JSON text, or None for an empty list. Raises TaskError for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except json.JSONDecodeError as error:
            raise TaskError(f"{where}: {name} is a text that is not JSON ({error.msg})") from error
    if value is None:
        return []
    if not isinstance(value, list):
        raise TaskError(f"{where}: {name} is not a list")
    return value


def _message(message: Message, is_trainable: bool) -> dict[str, JSON]:
    row: dict[str, JSON] = {"role": message.role, "content": message.content}
    if message.reasoning:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        row["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and not is_trainable:
        row["weight"] = 0
    return row


def _tool(tool: ToolSpec) -> dict[str, JSON]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.schema)}
    return {"type": "function", "function": function}
