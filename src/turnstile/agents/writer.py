"""A model as a function from a conversation to its answer: for statements of problems, and for judges."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from turnstile.agents.base import Renderer
from turnstile.engines.base import Engine
from turnstile.types import Message, Sampling

Write = Callable[[Sequence[Message], int], Awaitable[str]]
"""A conversation and a seed -> the model's answer. Raises EngineError where none can be had."""


def writer(engine: Engine, renderer: Renderer, sampling: Sampling) -> Write:
    """The model behind an engine, sampled as `sampling` says, to the end of its turn."""

    async def write(messages: Sequence[Message], seed: int) -> str:
        session = engine.open(f"write/{seed}")
        try:
            how = replace(sampling, stop=renderer.stop, seed=seed)
            completion = await engine.generate(renderer.prompt(messages, ()), how, session)
        finally:
            engine.close(session)
        return renderer.text(completion.token_ids)

    return write
