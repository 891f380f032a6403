"""A model as a function from a conversation to its answer: for statements of problems, and for judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from turnstile.agents.base import Renderer
from turnstile.engines.base import Engine
from turnstile.types import Message, Sampling


class Writer(Protocol):
    """A conversation and a seed -> the model's answer, which matches `regex` where one is given. Raises EngineError
    where none can be had."""

    async def __call__(self, messages: Sequence[Message], seed: int, regex: str = "") -> str: ...


def model_writer(engine: Engine, renderer: Renderer, sampling: Sampling) -> Writer:
    """The model behind an engine, sampled as `sampling` says, to the end of its turn."""

    async def write(messages: Sequence[Message], seed: int, regex: str = "") -> str:
        session = engine.open(f"write/{seed}")
        try:
            how = replace(sampling, stop=renderer.stop, seed=seed, regex=regex)
            completion = await engine.generate(renderer.prompt(messages, ()), how, session)
        finally:
            engine.close(session)
        return renderer.text(completion.token_ids)

    return write
