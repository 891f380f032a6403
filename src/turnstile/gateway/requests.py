"""Parsing of requests to the model server."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from turnstile.types import Message, Sampling

DEFAULT_TOKENS = 256
"""`max_tokens` of a request that does not set it."""


class RefusedError(ValueError):
    """A request that cannot be served; the message is the reason."""

    status = 400


class NotServedError(RefusedError):
    """A request for something that this server does not offer."""

    status = 404


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a request body. Raises RefusedError for anything else."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise RefusedError("the request is not JSON") from None
    if not isinstance(body, dict):
        raise RefusedError("the request is not a JSON object")
    return body


def parse_message(item: object) -> Message:
    """Return the message of plain text in a JSON object. Raises RefusedError for anything else."""
    if not isinstance(item, Mapping) or item.get("role") not in ("system", "user", "assistant"):
        raise RefusedError("a message is an object with a role (system, user or assistant) and content")
    content = item.get("content")
    if isinstance(content, list):  # parts, of which texts are supported
        content = "".join(str(part.get("text")) for part in content if isinstance(part, Mapping))
    if not isinstance(content, str):
        raise RefusedError("a message's content must be text")
    return Message(role=item["role"], content=content)


def parse_sampling(body: Mapping[str, Any], stop: tuple[str, ...]) -> Sampling:
    """Return the sampling of a request body; without a seed, a random one is drawn.

    Raises RefusedError for values that are out of range.
    """
    stop_strings = body.get("stop")
    constraints = body.get("structured_outputs")
    constraints = constraints if isinstance(constraints, Mapping) else {}
    maximum = body.get("max_completion_tokens", body.get("max_tokens"))
    sampling = Sampling(
        temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(body, "top_p", 1.0, 1e-9, 1.0),
        top_k=max(0, int(_number(body, "top_k", 0, -1, 2**31))),
        min_p=_number(body, "min_p", 0.0, 0.0, 1.0),
        max_tokens=int(_number({"max_tokens": maximum}, "max_tokens", DEFAULT_TOKENS, 1, 2**31)),
        stop=(*stop, *([stop_strings] if isinstance(stop_strings, str) else map(str, stop_strings or ()))),
        seed=int(_number(body, "seed", secrets.randbits(56), -(2**63), 2**63)),
        regex=str(constraints.get("regex") or ""),
        grammar=str(constraints.get("grammar") or ""),
    )
    if any(not item for item in sampling.stop):
        raise RefusedError("a stop string must not be empty")
    return sampling


def _number(body: Mapping[str, Any], name: str, default: float, minimum: float, maximum: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise RefusedError(f"{name} = {value!r} is not a number from {minimum:g} to {maximum:g}")
    return value
