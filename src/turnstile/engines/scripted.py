"""An engine that says what it is told: for demonstrations, policies that are no models, and tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from turnstile.errors import EngineError
from turnstile.types import I32, Completion, Sampling

Script = Callable[[str, int, I32], str]
"""(session, turn, prompt ids) -> what is said."""

Encode = Callable[[str], I32]
"""A text to the ids a model would have sampled for it, end marker and all (`Renderer.completion`)."""


class ScriptedEngine:
    """Obeys `engines.base.Engine`; the tokens of its texts have log-probability 0.

    `script` is asked once for each turn of each session, which is named `SHARE#N`.
    """

    def __init__(self, encode: Encode, script: Script) -> None:
        self._encode = encode
        self._script = script
        self._turns: dict[str, int] = {}
        self._serial = itertools.count()

    def open(self, share: str) -> str:
        session = f"{share}#{next(self._serial)}"
        self._turns[session] = 0
        return session

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        if session not in self._turns:
            raise EngineError(f"session {session!r} is not open")
        ids = self._encode(self._script(session, self._turns[session], prompt_ids))
        self._turns[session] += 1
        cut = ids[: sampling.max_tokens]
        return Completion(
            token_ids=cut,
            logprobs=np.zeros(len(cut), np.float32),
            versions=np.zeros(len(cut), np.int32),
            sampling=sampling,
            finish="stop" if len(cut) == len(ids) else "length",
            seconds=0.0,
        )

    def close(self, session: str) -> None:
        del self._turns[session]
