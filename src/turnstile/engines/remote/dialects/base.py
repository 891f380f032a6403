"""What servers have in common: an answer to a prompt of ids, and who speaks how."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from turnstile.engines.remote.weights import Weights
from turnstile.errors import EngineError
from turnstile.types import I32, Sampling

CERTAIN = 1e-3
"""The log-probability of the only token that may be drawn differs from 0 by no more."""


class Connection(Protocol):
    """Requests to one server, see `engines.remote.endpoint`."""

    url: str

    async def get(self, path: str, *, root: bool = False) -> dict[str, Any]: ...

    async def post(
        self, path: str, body: Mapping[str, Any], *, root: bool = False, session: str = ""
    ) -> dict[str, Any]: ...

    async def control(self, path: str, body: Mapping[str, Any], *, root: bool = False) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What was sampled. `labels`: the name of the weights of each token, `forced`: whether a rule left no other, where
    the server says it."""

    ids: list[int]
    logprobs: list[float]
    finish: object
    entropies: list[float] | None = None
    labels: list[str] | None = None
    forced: list[bool] | None = None


class Dialect(Protocol):
    """Speaks to one kind of server."""

    masked: bool
    """Whether log-probabilities of what a regex or a grammar holds heed that."""

    async def prepare(self, server: Connection) -> None:
        """Before anything is asked: mends the state that a trainer which was killed may have left a server in."""
        ...

    async def ask(
        self, server: Connection, model: str, prompt_ids: I32, sampling: Sampling, session: str = ""
    ) -> Answer | None:
        """What the server samples; None where ids or log-probabilities are missing. Requests of one `session` have
        much in common. Errors as of `Endpoint.post`."""
        ...

    async def load(self, server: Connection, weights: Weights) -> None:
        """Has the server sample with these from the next token on, and forget what it computed with others. Raises
        ConfigError for a server that is not started so that it can, EngineError where it cannot."""
        ...


def the_one(items: object) -> Mapping[str, Any]:
    """The only choice of an answer. Raises EngineError where there is not one."""
    found = items if isinstance(items, list) else []
    if len(found) != 1 or not isinstance(found[0], Mapping):
        raise EngineError(f"the server answered with {len(found)} choices instead of one")
    return found[0]


def sampled(ids: object, logprobs: object) -> tuple[list[int], list[float]] | None:
    """Token ids and their log-probabilities, if these are such, with one for each."""
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        return None
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        return None
    if not all(isinstance(x, int | float) and math.isfinite(x) and x <= CERTAIN for x in logprobs):
        return None
    return ids, [float(value) for value in logprobs]


def rules(sampling: Sampling) -> dict[str, str]:
    """What holds an answer, if anything does."""
    found = {"regex": sampling.regex, "grammar": sampling.grammar}
    return {name: text for name, text in found.items() if text}
