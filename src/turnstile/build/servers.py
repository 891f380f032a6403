"""A recipe's engine where that is a server: what speaks through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnstile.agents.base import Scaffold
from turnstile.build.kinds import bind
from turnstile.config import Kind, Recipe
from turnstile.engines.router import Replica, Router
from turnstile.errors import ConfigError
from turnstile.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """A model behind a server. `context` is how many ids it can hold, 0 where nobody says it."""

    scaffold: Scaffold
    engine: Replica
    context: int

    async def close(self) -> None:
        await self.engine.disconnect()


def is_text(recipe: Recipe) -> bool:
    """Whether the recipe's server takes messages, so that no tokenizer is needed."""
    return recipe.engine.knobs.get("mode") == "text"


async def make_remote(recipe: Recipe, scaffold: Scaffold) -> Remote:
    """The recipe's server, once it has shown what it can do; the servers, where `engine.url` names several.

    Raises ConfigError for what is missing or
    cannot be done, EngineGoneError for a server that does not answer.
    """
    knobs = recipe.engine.knobs
    urls = knobs.pop("url", "")
    engine = make_servers(recipe.engine.kind, [urls] if isinstance(urls, str) else urls, knobs)
    try:
        await engine.meet(scaffold.renderer.prompt([Message(role="user", content="Hello.")], ()))
    except BaseException:
        await engine.disconnect()
        raise
    windows = [window for window in (recipe.episode.context, engine.context) if window]
    return Remote(
        scaffold=scaffold,
        engine=engine,
        context=recipe.episode.context if is_text(recipe) else min(windows, default=0),
    )


def make_servers(kind: str, urls: Sequence[str], knobs: dict[str, object]) -> Replica:
    """The engine at an address, or a router over the engines at several."""
    maker = bind("engine", Kind.model_validate({"kind": kind, **knobs}), given=("url",))
    if not urls or not all(isinstance(url, str) and url for url in urls):
        raise ConfigError(f"engine.kind = {kind!r} needs engine.url, like http://127.0.0.1:8000/v1, or a list of them")
    replicas: list[Replica] = [maker(url) for url in urls]
    return replicas[0] if len(replicas) == 1 else Router(replicas)
