"""Trajectories of mini-swe-agent, one per file `ID.traj.json`.

`trajectory_format` is mini-swe-agent-1 (versions 1: the action is a bash block in the assistant's text, and its result
a user message) or mini-swe-agent-1.1 (versions 2: calls of the tool bash as chat messages or as items of OpenAI's
Responses API; a block in the text for its text-based models). `info` contains exit_status, submission and the
configuration; the benchmark runner adds instance_id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from turnstile.errors import TaskError
from turnstile.tasks.conversations import chat
from turnstile.tasks.conversations.conversation import Conversation, FlaggedMessage, assemble
from turnstile.types import Message, ToolSpec

BASH = ToolSpec(
    name="bash",
    description="Execute a bash command",
    schema={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
        "required": ["command"],
    },
)
"""The only tool of mini-swe-agent, with the description that it gives to the model."""


def from_row(row: Mapping[str, Any], where: str) -> Conversation:
    """Return a trajectory as a conversation.

    A text without exactly one action is not trained on. Raises TaskError saying what is wrong with the row.
    """
    info = _object(row.get("info"))
    messages = chat.as_list(row.get("messages"), "messages", where)
    flagged = list(_flagged_messages(messages, _action(info, where), where))
    tools = (BASH,) if any(message.tool_calls for message, _ in flagged) else ()
    name = str(row.get("instance_id") or "")
    return replace(
        assemble(flagged, tools),
        id=name,
        task_id=name,
        ended=str(info.get("exit_status") or ""),
        patch=str(info.get("submission") or ""),
        model=str(_object(_object(info.get("config")).get("model")).get("model_name") or ""),
    )


def _flagged_messages(messages: list[Any], action: re.Pattern[str] | None, where: str) -> Iterator[FlaggedMessage]:
    for number, item in enumerate(messages, start=1):
        here = f"{where}, message {number}"
        if isinstance(item, Mapping) and item.get("role") == "exit":  # the agent's note on its exit status
            continue
        message, is_trainable = _message(item, here)
        if action and is_trainable and not message.tool_calls:
            is_trainable = len(action.findall(message.content)) == 1
        yield message, is_trainable


def _message(item: Any, where: str) -> FlaggedMessage:
    if isinstance(item, Mapping) and item.get("object") == "response":
        return _response(chat.as_list(item.get("output"), "output", where), where), True
    if isinstance(item, Mapping) and item.get("type") == "function_call_output":
        text = chat.text_of(item.get("output"), where)
        return Message(role="tool", content=text, tool_call_id=item.get("call_id")), False
    return chat.message_of(item, where)


def _response(output: list[Any], where: str) -> Message:
    """Return the items of one answer of the Responses API as one message."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for item in map(_object, output):
        match item.get("type"):
            case "message":
                texts.append(chat.text_of(item.get("content"), where))
            case "reasoning":
                thoughts += [str(_object(part).get("text") or "") for part in item.get("summary") or ()]
            case "function_call":
                calls.append({"id": item.get("call_id") or item.get("id"), "function": item})
            case kind:
                raise TaskError(f"{where}: its output has an item of unknown type {kind!r}")
    message = chat.assistant_message("".join(texts), "\n\n".join(filter(None, thoughts)))
    return replace(message, tool_calls=chat.calls_of(calls, where))


def _action(info: Mapping[str, Any], where: str) -> re.Pattern[str] | None:
    """Return the pattern that finds actions in a text, or None if there is none.

    In version 1 it is a setting of the agent, in version 2 one of the text-based models.
    """
    config = _object(info.get("config"))
    patterns = [_object(config.get(part)).get("action_regex") for part in ("agent", "model")]
    pattern = next(filter(None, patterns), "")
    try:
        return re.compile(str(pattern), re.S) if pattern else None
    except re.error as error:
        raise TaskError(f"{where}: its action_regex is not a regular expression ({error})") from error


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
