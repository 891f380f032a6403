"""`turnstile serve`: a model in this process behind an OpenAI-compatible address."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from turnstile.config import make_recipe
from turnstile.gateway.reload import WeightReloader
from turnstile.gateway.server import EngineServer
from turnstile.trainer.checkpoint import load_weights
from turnstile.wiring.agent import make_agent


def make_server(
    model: str,
    overrides: Sequence[str] = (),
    *,
    name: str = "",
    token: str = "",
    renderer: str = "chat",
    weights_from: Path | None = None,
) -> EngineServer:
    """Return a server for a model, which is a folder, a hub id or a packaged name.

    `overrides` change keys of a recipe, such as engine.max_batch=32. Clients may make the server load weights from
    below `weights_from`. Raises ConfigError for a model that cannot be loaded.
    """
    parser = "lines" if renderer == "lines" else "hermes"
    agent = {"renderer": {"kind": renderer}, "parser": {"kind": parser}}
    recipe = make_recipe({"model": {"id": model}, "agent": agent}, overrides)
    made = make_agent(recipe)
    load = functools.partial(load_weights, made.model)
    return EngineServer(
        made.engine,
        model=name or model,
        scaffold=made.scaffold,
        tokenizer=made.tokenizer,
        context=made.context,
        token=token,
        reload=WeightReloader(made.engine, load, weights_from) if weights_from else None,
    )
