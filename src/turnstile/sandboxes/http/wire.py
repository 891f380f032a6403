"""The protocol between `remote` and `server`: frames like those of a container's runner, and typed errors.

A request is a POST of one frame (JSON, then bytes) or a PUT of a template's archive, and its answer is one frame. File
names and command arguments are JSON strings in which bytes that are not UTF-8 are escaped, so that nothing is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from turnstile.errors import (
    ConfigError,
    ContainerDiedError,
    DaemonError,
    DiskFullError,
    OutOfMemoryError,
    SandboxError,
)
from turnstile.sandboxes.containers.runner.frames import HEAD

WIRE = 2  # version of the protocol, which must be the same at both ends
TOKEN = "TURNSTILE_SANDBOX_TOKEN"
"""The environment variable that holds the token at both ends."""
POLL = 10.0  # seconds after which an unfinished request is answered with "wait", so that no answer takes long
KEPT = 300.0  # seconds for which a request is remembered, longer than a client repeats it

T = TypeVar("T")
_KNOWN: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        SandboxError,
        ContainerDiedError,
        DaemonError,
        DiskFullError,
        OutOfMemoryError,
        ConfigError,
        ValueError,
    )
}


class GarbageError(ValueError):
    """Raised for a message that is not a frame, or in which a field is missing or has the wrong type."""


def frame(message: Mapping[str, Any], data: bytes = b"") -> bytes:
    """Return a message and its data as one frame."""
    body = json.dumps(message).encode()
    return b"".join((HEAD.pack(len(body), len(data)), body, data))


def unframe(found: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the message and the data of a frame. Raises GarbageError if `found` is not a frame."""
    if len(found) < HEAD.size:
        raise GarbageError(f"{len(found)} bytes are no frame")
    size, data_size = HEAD.unpack_from(found)
    if len(found) != HEAD.size + size + data_size:
        raise GarbageError(f"{len(found)} bytes instead of the {HEAD.size + size + data_size} that are announced")
    middle = HEAD.size + size
    try:
        message = json.loads(found[HEAD.size : middle])
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise GarbageError("no JSON object at its beginning")
    return message, found[middle:]


def part(message: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a field of a message. Raises GarbageError if it is missing or has another type."""
    value = message.get(name)
    if not isinstance(value, kind):
        raise GarbageError(f"{name} is {value!r:.80} instead of a {kind.__name__}")
    return value


def error_message(error: Exception) -> dict[str, Any]:
    """Return a message that reports an error."""
    if isinstance(error, OSError):
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
        return {"errno": error.errno, "error": error.strerror or str(error), "name": name}
    kind = next((known.__name__ for known in type(error).__mro__ if known.__name__ in _KNOWN), None)
    if kind is None:
        return {"type": "SandboxError", "error": f"the sandbox server failed: {type(error).__name__}: {error}"}
    return {"type": kind, "error": str(error)}


def raise_error(message: Mapping[str, Any]) -> None:
    """Raise the error that an answer reports, if any. Raises GarbageError for an unknown type of error."""
    if "error" not in message:
        return
    text = part(message, "error", str)
    if "errno" in message:
        if not isinstance(message["errno"], int):
            raise OSError(text)
        raise OSError(message["errno"], text, *([message["name"]] if isinstance(message.get("name"), str) else []))
    kind = _KNOWN.get(part(message, "type", str))
    if kind is None:
        raise GarbageError(f"an error of the unknown type {message['type']!r:.80}")
    raise kind(text)
