"""Answers in OpenAI's protocol, whole or as the events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile.gateway.reload import version_spans
from turnstile.types import Completion, Message

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
