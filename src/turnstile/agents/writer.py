"""A model as a function from a conversation to its answer, for writing problem statements and for judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from turnstile.agents.base import Renderer
from turnstile.engines.base import Engine
from turnstile.types import Message, Sampling


class Writer(Protocol):
    """A function from a conversation and a seed to the model's answer, which matches `regex` if one is given.

    Raises EngineError if there is no answer.
    """

    async def __call__(self, messages: Sequence[Message], seed: int, regex: str = "") -> str:
        """Return the model's answer."""


def model_writer(engine: Engine, renderer: Renderer, sampling: Sampling) -> Writer:
    """Return a Writer that samples one full turn from `engine`, with the parameters of `sampling`."""

    async def write(messages: Sequence[Message], seed: int, regex: str = "") -> str:
        session = engine.open(f"write/{seed}")
        try:
            request = replace(sampling, stop=renderer.stop, seed=seed, regex=regex)
            completion = await engine.generate(renderer.prompt(messages, ()), request, session)
        finally:
            engine.close(session)
        return renderer.text(completion.token_ids)

    return write
