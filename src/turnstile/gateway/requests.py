"""What a request to the model server says."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from turnstile.types import Message, Sampling

DEFAULT_TOKENS = 256


class RefusedError(ValueError):
    """A request that cannot be served, and why."""

    status = 400


class NotServedError(RefusedError):
    """A request for what is not served here at all."""

    status = 404


def as_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        asked = json.loads(data)
    except (ValueError, RecursionError):
        raise RefusedError("the request is no JSON") from None
    if not isinstance(asked, dict):
        raise RefusedError("the request is no JSON object")
    return asked


def read_message(item: object) -> Message:
    """Read a message of plain text. Raises RefusedError for anything else."""
    if not isinstance(item, Mapping) or item.get("role") not in ("system", "user", "assistant"):
        raise RefusedError("a message is an object with a role (system, user or assistant) and content")
    content = item.get("content")
    if isinstance(content, list):  # its parts, of which texts are served
        content = "".join(str(part.get("text")) for part in content if isinstance(part, Mapping))
    if not isinstance(content, str):
        raise RefusedError("a message's content must be text")
    return Message(role=item["role"], content=content)


def read_sampling(asked: Mapping[str, Any], stop: tuple[str, ...]) -> Sampling:
    """What a request says of how tokens are drawn; one without a seed gets a seed of its own."""
    own = asked.get("stop")
    rules = asked.get("structured_outputs")
    rules = rules if isinstance(rules, Mapping) else {}
    most = asked.get("max_completion_tokens", asked.get("max_tokens"))
    sampling = Sampling(
        temperature=_number(asked, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(asked, "top_p", 1.0, 1e-9, 1.0),
        top_k=max(0, int(_number(asked, "top_k", 0, -1, 2**31))),
        min_p=_number(asked, "min_p", 0.0, 0.0, 1.0),
        max_tokens=int(_number({"max_tokens": most}, "max_tokens", DEFAULT_TOKENS, 1, 2**31)),
        stop=stop + ((own,) if isinstance(own, str) else tuple(str(item) for item in own or ())),
        seed=int(_number(asked, "seed", secrets.randbits(56), -(2**63), 2**63)),
        regex=str(rules.get("regex") or ""),
        grammar=str(rules.get("grammar") or ""),
    )
    if any(not item for item in sampling.stop):
        raise RefusedError("a stop string must not be empty")
    return sampling


def _number(asked: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = asked.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise RefusedError(f"{name} = {value!r} is no number from {least:g} to {most:g}")
    return value
