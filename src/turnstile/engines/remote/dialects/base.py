"""The protocol of dialects, and what they share, such as the parsed response to a prompt of ids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from turnstile.engines.remote.weights import PublishedWeights
from turnstile.errors import EngineError
from turnstile.types import I32, Sampling

CERTAINTY_TOLERANCE = 1e-3
"""Largest accepted deviation from 0 of the log-probability of a token that is certain."""


class Connection(Protocol):
    """Protocol of requests to one server; implemented by `engines.remote.endpoint.Endpoint`."""

    url: str

    async def get(self, path: str, *, root: bool = False) -> dict[str, Any]: ...

    async def post(
        self, path: str, body: Mapping[str, Any], *, root: bool = False, session: str = ""
    ) -> dict[str, Any]: ...

    async def control(self, path: str, body: Mapping[str, Any], *, root: bool = False) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RawCompletion:
    """Sampled tokens as a server returned them.

    `labels` names the weights that sampled each token, and `forced` says of each whether a constraint allowed no other.
    Both, like `entropies`, are None if the server does not report them.
    """

    ids: list[int]
    logprobs: list[float]
    finish: object
    entropies: list[float] | None = None
    labels: list[str] | None = None
    forced: list[bool] | None = None


class Dialect(Protocol):
    """Protocol of the ways to talk to one kind of server."""

    logprobs_are_masked: bool
    """Whether log-probabilities are those of the distribution after a regex or a grammar has masked it."""

    async def prepare(self, server: Connection) -> None:
        """Repair, before the first request, what a killed trainer may have left broken on the server."""
        ...

    async def complete(
        self, server: Connection, model: str, prompt_ids: I32, sampling: Sampling, session: str = ""
    ) -> RawCompletion | None:
        """Sample a completion; return None if the response lacks valid ids or log-probabilities.

        Requests of one `session` share prefixes. Raises the errors of `Endpoint.post`, and EngineError for a response
        without exactly one choice.
        """
        ...

    async def load(self, server: Connection, weights: PublishedWeights) -> None:
        """Make the server sample with `weights` from the next token on, and discard cache entries from older ones.

        Raises ConfigError for a server whose start options do not allow it, EngineError if the load fails.
        """
        ...


def only_choice(items: object) -> Mapping[str, Any]:
    """Return the only choice of a response. Raises EngineError if there is not exactly one."""
    choices = items if isinstance(items, list) else []
    if len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise EngineError(f"the server answered with {len(choices)} choices instead of one")
    return choices[0]


def parse_tokens(ids: object, logprobs: object) -> tuple[list[int], list[float]] | None:
    """Return token ids and log-probabilities if they are valid and equally many, else None."""
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        return None
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        return None
    if not all(isinstance(x, int | float) and math.isfinite(x) and x <= CERTAINTY_TOLERANCE for x in logprobs):
        return None
    return ids, [float(value) for value in logprobs]


def constraints_of(sampling: Sampling) -> dict[str, str]:
    """Return the regex or grammar that constrains the output, by name; empty if there is none."""
    constraints = {"regex": sampling.regex, "grammar": sampling.grammar}
    return {name: text for name, text in constraints.items() if text}
