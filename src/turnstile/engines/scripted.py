"""An engine that returns the texts of a policy function, for demonstrations, baselines and tests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

import numpy as np

from turnstile.errors import EngineError
from turnstile.types import I32, Completion, Sampling

Policy = Callable[[str, int, I32], str]
"""(session, turn, prompt_ids) -> the text of the turn, without its end marker."""


class TurnEncoder(Protocol):
    """The part of a renderer that encodes a text as a finished turn."""

    def completion(self, text: str) -> I32:
        """Return the ids i32[n] of a text as a finished turn."""
        ...


class ScriptedEngine:
    """An engine that returns the ids of `policy`'s texts with log-probability 0, cut at `Sampling.max_tokens`.

    The turn number counts from 0 in each session, and starts over when the session's first prompt is sent again, as
    when an attempt is replayed. Session ids are `SHARE#NUMBER`.
    """

    def __init__(self, writer: TurnEncoder, policy: Policy) -> None:
        self._writer = writer
        self._policy = policy
        self._turns: dict[str, int] = {}
        self._first_prompts: dict[str, bytes] = {}
        self._numbers = itertools.count()

    def open(self, share: str) -> str:
        """Open a session and return its id, `SHARE#NUMBER`."""
        session = f"{share}#{next(self._numbers)}"
        self._turns[session] = 0
        return session

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        """Return the policy's text for this turn. Raises EngineError for a closed session or an empty prompt."""
        if session not in self._turns:
            raise EngineError(f"session {session!r} is not open")
        if len(prompt_ids) == 0:
            raise EngineError("the prompt is empty")
        await asyncio.sleep(0)  # yield to other tasks, as any engine does
        prompt = np.asarray(prompt_ids, dtype=np.int32).tobytes()
        if self._first_prompts.setdefault(session, prompt) == prompt:
            self._turns[session] = 0
        turn = self._turns[session]
        self._turns[session] += 1
        whole = self._writer.completion(self._policy(session, turn, prompt_ids))
        ids = np.asarray(whole[: sampling.max_tokens], dtype=np.int32)
        return Completion(
            token_ids=ids,
            logprobs=np.zeros(len(ids), dtype=np.float32),
            versions=np.zeros(len(ids), dtype=np.int32),
            entropies=np.zeros(len(ids), dtype=np.float32),
            sampling=sampling,
            finish="stop" if len(ids) == len(whole) else "length",
            seconds=0.0,
        )

    def close(self, session: str) -> None:
        """Close a session."""
        del self._turns[session]
        self._first_prompts.pop(session, None)
