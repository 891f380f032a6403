"""Requests: what all protocols share of their bodies, how a body is read, and why a request is refused."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnstile.types import Sampling
from turnstile.validation import first_problem, format_place, wrong

MAX_CHOICES = 128
"""The largest `n` that a request may have."""
MAX_LINE = 300  # characters of an error message, since a value may be as long as a prompt


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
    """Fields of a request, which must have their declared types. Other fields are ignored.

    `neutral` are unsupported fields that affect the answer -> the value with which they have no effect.
    """

    neutral: ClassVar[Mapping[str, Any]] = {}
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool = False


class StructuredOutputs(RequestBody):
    """The regular expression or grammar that the sampled text must match, in vLLM's format."""

    regex: str = ""
    grammar: str = ""


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
    for name, neutral in kind.neutral.items():
        if given.get(name, neutral) != neutral:
            raise RefusedError(f"{name} is not supported")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        place, problems, _ = first_problem(error, given)
        raise RefusedError(f"{format_place(place)} {wrong(problems)}"[:MAX_LINE]) from None
