"""Anthropic's Messages protocol: requests, answers (whole or as the events of a stream) and errors."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from turnstile.gateway.requests import RefusedError, RequestBody, SamplingBody
from turnstile.tasks.conversations.conversation import with_parser_ids
from turnstile.types import Completion, Message, ToolCall, ToolSpec

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""HTTP status -> the protocol's type of error. Any other status is an `api_error`."""
Block = Mapping[str, Any]


class ToolChoice(RequestBody):
    """Whether the model may call tools, and whether it may call several at once."""

    type: Literal["auto", "none"] = "auto"
    disable_parallel_tool_use: bool = False


class CountBody(RequestBody):
    """A request that holds a conversation, such as a request to count its tokens."""

    model: str
    messages: Annotated[list[Any], Field(min_length=1)]
    system: str | list[Any] = ""
    tools: list[Any] = Field(default_factory=list)

    def conversation(self) -> tuple[list[Message], tuple[ToolSpec, ...]]:
        """Return the messages and the tools. Tool calls get ids like those that parsers give.

        Raises RefusedError for content that cannot be read, and for the result of a call that no earlier message makes.
        """
        system = _text(self.system, "system")
        messages = [Message(role="system", content=system)] if system else []
        called: set[str] = set()
        for number, item in enumerate(self.messages):
            where = f"messages[{number}]"
            role = item.get("role") if isinstance(item, Mapping) else None
            if role not in ("user", "assistant"):
                raise RefusedError(f"{where}: the role {role!r} is unknown; known: user, assistant")
            content = item.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _blocks(content, where)
            found = [_assistant(blocks, where)] if role == "assistant" else list(_user(blocks, where))
            for message in found:
                called.update(call.id for call in message.tool_calls)
                if message.role == "tool" and message.tool_call_id not in called:
                    raise RefusedError(f"{where}: no message before it calls {message.tool_call_id!r}")
            messages += found
        return list(with_parser_ids(messages)), tuple(_tool(tool, number) for number, tool in enumerate(self.tools))


class MessagesBody(CountBody, SamplingBody):
    """A request for the next message of a conversation."""

    neutral: ClassVar[Mapping[str, Any]] = {"container": None, "mcp_servers": []}
    max_tokens: Annotated[int, Field(ge=1)]
    stop: list[str] = Field([], alias="stop_sequences")
    n: Literal[1] = 1
    tool_choice: ToolChoice = ToolChoice()


def _blocks(content: object, where: str) -> list[Block]:
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise RefusedError(f"{where}: its content must be a text or a list of blocks")
    return content


def _text(content: object, where: str) -> str:
    """Return `content` if it is a text, or the joined texts of its blocks."""
    if isinstance(content, str):
        return content
    texts = []
    for block in _blocks(content, where):
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise RefusedError(f"{where}: a block of type {block.get('type')!r} is not supported here, only text")
        texts.append(block["text"])
    return "\n".join(texts)


def _assistant(blocks: Sequence[Block], where: str) -> Message:
    texts = [block for block in blocks if block.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    thoughts = [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]
    calls = []
    for block in blocks:
        if block.get("type") == "tool_use":
            name, arguments = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(arguments, Mapping):
                raise RefusedError(f"{where}: a tool_use needs a name and an input, which is an object")
            calls.append(ToolCall(id=str(block.get("id", "")), name=name, arguments=dict(arguments)))
    return Message(
        role="assistant",
        content=_text(texts, where),
        reasoning="\n\n".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _user(blocks: Sequence[Block], where: str) -> Iterator[Message]:
    """Yield the tool results of a user's message, and the texts between them, in order."""
    texts: list[Block] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield Message(role="user", content=_text(texts, where))
            texts = []
        content = _text(block.get("content") or "", where)
        yield Message(role="tool", content=content, tool_call_id=str(block.get("tool_use_id", "")))
    if texts or not blocks:
        yield Message(role="user", content=_text(texts, where))


def _tool(tool: object, number: int) -> ToolSpec:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        raise RefusedError(f"tools[{number}] has no name")
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise RefusedError(f"tools[{number}]: only tools with an input_schema are supported")
    return ToolSpec(name=tool["name"], description=str(tool.get("description") or ""), schema=dict(schema))


def answer(model: str, message: Message, completion: Completion, prompt_tokens: int) -> dict[str, Any]:
    """Return an answer in Anthropic's format with an assistant's message. Its tool calls get ids of their own."""
    content: list[dict[str, Any]] = []
    if message.reasoning is not None:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.tool_calls:
        content.append({"type": "text", "text": message.content})
    content += [
        {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": call.name, "input": dict(call.arguments)}
        for call in message.tool_calls
    ]
    stop = "max_tokens" if completion.finish == "length" else "end_turn"
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "tool_use" if message.tool_calls else stop,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": len(completion.token_ids)},
    }


def events(whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream that add up to the answer `whole`, each with its type."""
    usage = whole["usage"]
    head = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": head}
    for index, block in enumerate(whole["content"]):
        kind = block["type"]
        if kind == "tool_use":
            begun = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            begun, delta = {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stopped = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": stopped, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}


def error_fields(status: int, why: str) -> dict[str, Any]:
    """Return an error in the format of Anthropic's protocol."""
    return {"type": "error", "error": {"type": ERRORS.get(status, "api_error"), "message": why}}
