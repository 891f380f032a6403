"""A recipe's engine if it runs on servers, and the agent that uses it."""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnstile.agents.base import Scaffold
from turnstile.config import Kind, Recipe
from turnstile.engines.remote.replica import Replica
from turnstile.engines.remote.router import Router
from turnstile.engines.remote.weights import PublishedWeights
from turnstile.errors import ConfigError
from turnstile.types import Message
from turnstile.wiring.kinds import bind


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """A model on one or more servers, with its scaffold. `context` is how many ids it can hold, or 0 if unknown."""

    scaffold: Scaffold
    engine: Replica | Router
    context: int

    async def close(self) -> None:
        await self.engine.disconnect()


def is_text(recipe: Recipe) -> bool:
    """Return whether the recipe's server takes messages, so that no tokenizer is needed."""
    return recipe.engine.knobs.get("mode") == "text"


def check_servers(recipe: Recipe) -> None:
    """Raise ConfigError if the recipe shows that its servers cannot be used for training."""
    if recipe.engine.kind != "openai":
        raise ConfigError(
            f"engine.kind = {recipe.engine.kind!r} cannot train; take transformers, or openai for servers"
        )
    if is_text(recipe):
        raise ConfigError("engine.mode = 'text' is for evaluation and judges; training needs ids: use 'tokens'")
    _replicas(recipe.engine.kind, _urls(recipe), _knobs(recipe))


async def make_remote(recipe: Recipe, scaffold: Scaffold, *, training: bool = False) -> Remote:
    """Connect to the recipe's server, or servers if `engine.url` names several, and return them.

    With `training`, they are always behind a router, which distributes weights. Raises ConfigError for missing
    abilities and EngineGoneError if a server does not answer.
    """
    reconnect_timeout = recipe.engine.reconnect_timeout if training else None
    engine = make_servers(recipe.engine.kind, _urls(recipe), _knobs(recipe), reconnect_timeout=reconnect_timeout)
    try:
        await engine.connect(scaffold.renderer.prompt([Message(role="user", content="Hello.")], ()))
    except BaseException:
        await engine.disconnect()
        raise
    windows = [window for window in (recipe.episode.context, engine.context) if window]
    return Remote(
        scaffold=scaffold,
        engine=engine,
        context=recipe.episode.context if is_text(recipe) else min(windows, default=0),
    )


def make_servers(
    kind: str, urls: Sequence[str], knobs: dict[str, object], *, reconnect_timeout: float | None = None
) -> Replica | Router:
    """Return the engine at one address, or a router over the engines at several.

    With `reconnect_timeout`, the seconds to wait for a lost server, it is always a router, for training.
    """
    training = {} if reconnect_timeout is None else {"training": True}
    makers = _replicas(kind, urls, knobs | training)
    if len(makers) == 1 and reconnect_timeout is None:
        return makers[0]()
    return Router([make() for make in makers], reconnect_timeout=reconnect_timeout or 0.0)


def _replicas(kind: str, urls: Sequence[str], knobs: dict[str, object]) -> list[Callable[[], Replica]]:
    """Return a function for each address that makes its engine. Raises ConfigError for wrong knobs or no address."""
    maker = bind("engine", Kind.model_validate({"kind": kind, **knobs}), given=("url",))
    if not urls or not all(isinstance(url, str) and url for url in urls):
        raise ConfigError(f"engine.kind = {kind!r} needs engine.url, like http://127.0.0.1:8000/v1, or a list of them")
    return [functools.partial(maker, url) for url in urls]


def _urls(recipe: Recipe) -> list[str]:
    urls = recipe.engine.knobs.get("url", "")
    return [urls] if isinstance(urls, str) else list(urls)


def _knobs(recipe: Recipe) -> dict[str, object]:
    return {name: value for name, value in recipe.engine.knobs.items() if name != "url"}


class ServedWeights:
    """The engine of training on servers, which load published weights from a folder.

    `write` stores the weights of a version in a folder and returns its path. Implements `engines.base.Engine` and
    `rollout.source.Publisher`.
    """

    def __init__(self, recipe: Recipe, router: Router, write: Callable[[int], Path]) -> None:
        self._router, self._write, self._head = router, write, recipe.model.train == "all"
        self._owner, self._numbers = secrets.token_hex(6), itertools.count()
        self.open, self.close, self.generate = router.open, router.close, router.generate
        self.is_reachable = router.is_reachable
        self.take_stats = router.take_stats

    def publish(self, version: int) -> None:
        self.hand_out(version, self._write(version))

    def hand_out(self, version: int, folder: Path) -> None:
        """Publish weights that are already in a folder to the servers."""
        serial = next(self._numbers)
        self._router.publish(
            PublishedWeights(version=version, folder=folder, owner=self._owner, serial=serial, head=self._head)
        )
