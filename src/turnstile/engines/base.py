"""What samples tokens: token ids in, token ids and their log-probabilities out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from turnstile.types import I32, Completion, Sampling


@runtime_checkable
class Engine(Protocol):
    """Samples completions for many sessions at once.

    A session is one episode's conversation; the sessions of one `share` name (a group's attempts) may share
    computed prefixes. Between `open` and `close` an engine may keep what it computed; correctness never
    depends on it: `prompt_ids` is always the whole prompt. Raises EngineError when it cannot sample.
    """

    def open(self, share: str) -> str:
        """A new session's id."""
        ...

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion: ...

    def close(self, session: str) -> None: ...
