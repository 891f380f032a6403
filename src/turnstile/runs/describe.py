"""`turnstile tasks describe`: a model in this process that words the problem statements of repository tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from turnstile.agents.writer import model_writer
from turnstile.config import make_recipe
from turnstile.swe.bugs.describe import Described, describe
from turnstile.types import Sampling
from turnstile.wiring.agent import make_agent


def describe_tasks(
    file: str | Path,
    model: str,
    *,
    tries: int = 3,
    temperature: float = 0.7,
    max_tokens: int = 256,
    done: Callable[[Described], None] = lambda one: None,
) -> list[Described]:
    """Write problem statements with a chat model in this process. See `swe.bugs.describe.describe`."""
    recipe = make_recipe(
        {"model": {"id": model}, "agent": {"renderer": {"kind": "chat"}, "parser": {"kind": "hermes"}}}
    )
    agent = make_agent(recipe)
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    write = model_writer(agent.engine, agent.scaffold.renderer, sampling)
    return asyncio.run(describe(file, write, model=model, tries=tries, done=done))
