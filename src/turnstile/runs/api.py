"""The Python entry point, which does what `turnstile train` does from a notebook, a script or a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnstile.config import Recipe, load_recipe, make_recipe
from turnstile.envs.base import Env
from turnstile.runs.train import train as train_recipe
from turnstile.types import Task


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    *,
    env: Callable[..., Env] | None = None,
    reward: Callable[..., Any] | None = None,
    tasks: Sequence[Task] | None = None,
    heldout: Sequence[Task] | None = None,
    run: str | Path | None = None,
    fresh: bool = False,
    overfit: str | None = None,
) -> dict[str, Any]:
    """Train by a recipe, given as the path of a TOML file, as nested mappings with the same contents, or as a `Recipe`.

    `env` is a callable that makes an environment when called with the recipe's `env` knobs, `reward` is a function
    `(task, trajectory) -> float`, and `tasks` and `heldout` are lists that replace the recipe's files. The run is
    written to the folder `run`, by default runs/NAME. A second call continues it where it stopped, and `fresh` starts
    it anew. Returns `results` (evaluation name -> list of EpisodeResult), `report` (path), `run` and `step`. Must not
    be called from inside a running event loop; in a notebook use `await asyncio.to_thread(turnstile.train, ...)`.
    """
    if isinstance(recipe, Mapping):
        recipe = make_recipe(recipe, env=env)
    elif not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, env=env)
    folder = Path(run) if run is not None else Path("runs") / recipe.name
    return train_recipe(
        recipe, run=folder, fresh=fresh, overfit=overfit, env=env, reward=reward, tasks=tasks, heldout=heldout
    )
