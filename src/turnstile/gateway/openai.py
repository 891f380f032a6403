"""OpenAI's protocol: requests, and answers whole or as the events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from turnstile.errors import TaskError
from turnstile.gateway.reload import version_spans
from turnstile.gateway.requests import RefusedError, RequestBody, SamplingBody
from turnstile.tasks.conversations.chat import message_of, tools_of
from turnstile.tasks.conversations.conversation import with_parser_ids
from turnstile.types import Completion, Message, ToolSpec

NEUTRAL: Mapping[str, Any] = {
    "audio": None,
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "functions": [],
    "logit_bias": {},
    "presence_penalty": 0,
    "suffix": "",
    "top_logprobs": 0,
}
"""Unsupported fields of the protocol that affect sampling -> the value with which they have no effect."""


class JSONSchema(RequestBody):
    """A JSON schema. Its name and other fields beside it are ignored."""

    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(RequestBody):
    """Whether the text must be JSON, and which schema it must follow."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema = JSONSchema()

    def grammar(self) -> str:
        """Return the grammar of texts in this format, or "" if any text is allowed."""
        if self.type == "text":
            return ""
        schema = self.json_schema.schema_ if self.type == "json_schema" else {"type": "object"}
        return f"start: %json {json.dumps(schema)}"


class CompletionBody(SamplingBody):
    """A request to continue a text or token ids."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL
    prompt: str | list[Annotated[int, Field(ge=0, lt=2**31)]]
    logprobs: bool | Annotated[int, Field(ge=0)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities. The value 0 asks for those of the sampled tokens alone."""
        return self.logprobs is not None and self.logprobs is not False


class ChatBody(SamplingBody):
    """A request for the next message of a conversation."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL
    messages: Annotated[list[Any], Field(min_length=1)]
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    response_format: ResponseFormat = ResponseFormat(type="text")

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self.logprobs

    def conversation(self) -> tuple[list[Message], tuple[ToolSpec, ...]]:
        """Return the messages and the tools. Tool calls get ids like those that parsers give.

        Raises RefusedError for content that cannot be read, and for the result of a call that no earlier message makes.
        """
        called: set[str] = set()
        messages: list[Message] = []
        try:
            for number, item in enumerate(self.messages):
                message, _ = message_of(item, f"messages[{number}]")
                called.update(call.id for call in message.tool_calls)
                if message.role == "tool" and message.tool_call_id not in called:
                    raise RefusedError(f"messages[{number}]: no message before it calls {message.tool_call_id!r}")
                messages.append(message)
            return list(with_parser_ids(messages)), tools_of(self.tools, "tools")
        except TaskError as error:
            raise RefusedError(str(error)) from None


Labels = Mapping[int, str]
"""Maps weight versions of the engine to the names that clients gave them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The fields that all parts of one answer share. `created` is in seconds since 1970."""

    id: str
    model: str
    created: int

    @classmethod
    def of(cls, prefix: str, model: str) -> Head:
        """Return the head of a new answer, with an id that begins with `prefix`."""
        return cls(id=f"{prefix}-{secrets.token_hex(12)}", model=model, created=int(time.time()))

    def body(self, kind: str, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a part of the answer as a JSON object with `kind` as its field `object`."""
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "choices": list(choices), **more}


def usage(prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, int]:
    """Return how many tokens a request used."""
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }


def text_logprobs(completion: Completion, decode: Callable[[int], str]) -> dict[str, Any]:
    """Return the sampled tokens and their log-probabilities in the format of text completions."""
    return {
        "tokens": [decode(token) for token in completion.token_ids.tolist()],
        "token_logprobs": completion.logprobs.astype(float).tolist(),
    }


def chat_logprobs(completion: Completion, decode: Callable[[int], str]) -> dict[str, Any]:
    """Return the sampled tokens and their log-probabilities in the format of chat completions.

    The tokens of reasoning and tool calls are included.
    """
    texts = map(decode, completion.token_ids.tolist())
    return {
        "content": [
            {"token": text, "bytes": list(text.encode()), "logprob": float(logprob), "top_logprobs": []}
            for text, logprob in zip(texts, completion.logprobs, strict=True)
        ],
        "refusal": None,
    }


def token_fields(completion: Completion, labels: Labels) -> dict[str, Any]:
    """Return the fields that training needs besides log-probabilities.

    These are the sampled ids, the weights that sampled each of them and, if known, entropies and forced tokens.
    """
    found: dict[str, Any] = {
        "token_ids": completion.token_ids.tolist(),
        "weight_versions": version_spans(completion.versions, labels),
    }
    if completion.entropies is not None:
        found["entropies"] = completion.entropies.astype(float).tolist()
    if completion.forced is not None:
        found["forced"] = completion.forced.tolist()
    return found


def message_fields(message: Message) -> dict[str, Any]:
    """Return an assistant's message in OpenAI's format. Its tool calls get ids that no other answer has."""
    found: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["content"] = message.content or None
        found["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    return found


def chat_chunks(head: Head, choices: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream that add up to `choices`."""
    for choice in choices:
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        deltas += [
            {"tool_calls": [{"index": number, **call}]} for number, call in enumerate(message.get("tool_calls", ()))
        ]
        for delta in deltas:
            yield _chunk(head, choice["index"], delta, None)
        rest = {name: value for name, value in choice.items() if name not in ("index", "message", "finish_reason")}
        yield _chunk(head, choice["index"], {}, choice["finish_reason"], **rest)


def _chunk(head: Head, index: int, delta: Mapping[str, Any], finish: str | None, **rest: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish, **rest}
    return head.body("chat.completion.chunk", [choice])


def error_fields(why: str, *, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return an error in the format of OpenAI's protocol."""
    return {"error": {"message": why, "type": kind, "param": None, "code": code}}
