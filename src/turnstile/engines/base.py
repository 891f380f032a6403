"""What samples tokens: token ids in, token ids and their log-probabilities out."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from turnstile.types import F32, I32, Completion, Sampling


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


@runtime_checkable
class Remote(Protocol):
    """An engine in another process, which can be gone."""

    async def answers(self, session: str) -> bool:
        """Whether what samples for the session says, just now, that it is there."""
        ...


@runtime_checkable
class Scores(Protocol):
    """An engine that can also say how likely given tokens are. Not every engine can: a server returns the
    log-probabilities of what it sampled."""

    def window(self) -> int:
        """Tokens that the model can hold."""
        ...

    async def score(self, prompt_ids: I32, token_ids: I32, session: str) -> F32:
        """The log-probability f32[n] of each of `token_ids` behind the prompt and those before it, by the model's own
        distribution: at temperature 1, nothing cut off. Raises EngineError when it cannot be had."""
        ...
