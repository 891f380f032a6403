"""Requests in OpenAI's protocol: the fields that they may have, and the sampling that they ask for."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnstile.errors import TaskError
from turnstile.tasks.conversations.chat import message_of, tools_of
from turnstile.tasks.conversations.conversation import with_parser_ids
from turnstile.types import Message, Sampling, ToolSpec
from turnstile.validation import first_problem, format_place, wrong

MAX_CHOICES = 128
"""The largest `n` that a request may have."""
MAX_LINE = 300  # characters of an error message, since a value may be as long as a prompt
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


class RefusedError(ValueError):
    """Raised for a request that cannot be served. The message says why."""

    status = 400
    code: str | None = None


class NotServedError(RefusedError):
    """Raised for a request for something that this server does not offer."""

    status = 404
    code = "not_found"


class RequestTooLargeError(RefusedError):
    """Raised for a request with more bytes than this server reads."""

    status = 413


class ContextLengthError(RefusedError):
    """Raised for a request that does not fit into the model's context."""

    code = "context_length_exceeded"


class RequestBody(BaseModel):
    """Fields of a request, which must have their declared types. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool = False


class StructuredOutputs(RequestBody):
    """What the sampled text must match, in vLLM's format."""

    regex: str = ""
    grammar: str = ""


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


class SamplingBody(RequestBody):
    """The fields that all requests for completions share."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    structured_outputs: StructuredOutputs = StructuredOutputs()
    return_token_ids: bool = False

    def limit(self) -> int | None:
        """Return how many tokens a completion may have, or None if the request sets no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling(self, max_tokens: int, *, stop: tuple[str, ...] = (), grammar: str = "") -> list[Sampling]:
        """Return the settings of each of the `n` completions, which differ in their seeds.

        If the request has no seed, one is drawn. Raises RefusedError for an empty stop string.
        """
        own = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(own):
            raise RefusedError("a stop string must not be empty")
        seed = secrets.randbits(56) if self.seed is None else self.seed
        return [
            Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=max(0, self.top_k),
                min_p=self.min_p,
                max_tokens=max_tokens,
                stop=(*stop, *own),
                seed=seed + number,
                regex=self.structured_outputs.regex,
                grammar=self.structured_outputs.grammar or grammar,
            )
            for number in range(self.n)
        ]


class CompletionBody(SamplingBody):
    """A request to continue a text or token ids."""

    prompt: str | list[Annotated[int, Field(ge=0, lt=2**31)]]
    logprobs: bool | Annotated[int, Field(ge=0)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities. The value 0 asks for those of the sampled tokens alone."""
        return self.logprobs is not None and self.logprobs is not False


class ChatBody(SamplingBody):
    """A request for the next message of a conversation."""

    messages: Annotated[list[Any], Field(min_length=1)]
    tools: list[Any] = []
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


Body = TypeVar("Body", bound=RequestBody)


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a request body. Raises RefusedError for anything else."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise RefusedError("the request is not JSON") from None
    if not isinstance(body, dict):
        raise RefusedError("the request is not a JSON object")
    return body


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Return the body of a request as a `kind`. A field that is null counts as missing.

    Raises RefusedError, which names the first field that is wrong or not supported.
    """
    given = {name: value for name, value in parse_json_object(data).items() if value is not None}
    for name, neutral in NEUTRAL.items():
        if given.get(name, neutral) != neutral:
            raise RefusedError(f"{name} is not supported")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        place, problems, _ = first_problem(error, given)
        raise RefusedError(f"{format_place(place)} {wrong(problems)}"[:MAX_LINE]) from None
