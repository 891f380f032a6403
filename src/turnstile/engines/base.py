"""Protocols of engines, which take token ids and return sampled token ids with their log-probabilities."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from turnstile.types import F32, I32, Completion, Sampling


@runtime_checkable
class Engine(Protocol):
    """Protocol of engines, which sample completions for many sessions at once.

    A session is the conversation of one episode. Sessions opened with the same `share` name (the attempts of a group)
    may share computed prefixes. An engine may keep what it computed between `open` and `close`, but correctness never
    depends on that, since `prompt_ids` is always the whole prompt. Methods raise EngineError when the engine cannot
    sample.
    """

    def open(self, share: str) -> str:
        """Open a session and return its id."""
        ...

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        """Sample a completion of the prompt."""
        ...

    def close(self, session: str) -> None:
        """Close a session."""
        ...


@runtime_checkable
class RemoteEngine(Protocol):
    """An engine in another process, which can become unreachable."""

    async def is_reachable(self, session: str) -> bool:
        """Return whether the server that samples for a session answers a health check now."""
        ...


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that also returns the log-probabilities of given tokens.

    Not every engine can do this, since servers return log-probabilities only of tokens that they sampled.
    """

    def window(self) -> int:
        """Return the model's context length in tokens."""
        ...

    async def score(self, prompt_ids: I32, token_ids: I32, session: str) -> F32:
        """Return the log-probabilities f32[n] of `token_ids`, each given the prompt and the tokens before it.

        The distribution is the model's own, at temperature 1 and without truncation. Raises EngineError when the engine
        cannot score.
        """
        ...
