"""The Python entry point: what `turnstile train` does, from a notebook, a script or a test."""

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
    """Train as a recipe says: the path of a TOML file, the same as nested mappings, or a `Recipe`.

    `env` is anything that makes an environment when called with the recipe's `env` knobs, `reward` a function `(task,
    trajectory) -> float`, `tasks` and `heldout` are lists in place of the recipe's files. The run goes to the folder
    `run`, by default runs/NAME; a second call continues it where it was stopped, and `fresh` starts it anew. Returns
    `results` (evaluation name -> list of EpisodeResult), `report` (path), `run` and `step`. Must not be called from
    inside a running event loop; in a notebook use `await asyncio.to_thread(turnstile.train, ...)`.
    """
    if isinstance(recipe, Mapping):
        recipe = make_recipe(recipe, env=env)
    elif not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, env=env)
    folder = Path(run) if run is not None else Path("runs") / recipe.name
    return train_recipe(
        recipe, run=folder, fresh=fresh, overfit=overfit, env=env, reward=reward, tasks=tasks, heldout=heldout
    )
