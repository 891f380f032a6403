"""Run folders and recipes from command-line arguments."""

from __future__ import annotations

from pathlib import Path

from turnstile.config import Recipe
from turnstile.errors import ConfigError
from turnstile.lookup import nearest

RUNS = Path("runs")


def run_folder(name: str | None, out: str | None, recipe: Recipe) -> Path:
    """Return the folder of a new run: `out` if given, else `runs/NAME`, by default with the recipe's name.

    Raises ConfigError if both are given or the name is a path.
    """
    if name is not None and out is not None:
        raise ConfigError("--run and --out both say where the run goes; give one of them")
    if out is not None:
        return Path(out)
    name = name or recipe.name
    if not name or Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"--run {name!r} is a name below {RUNS}/, not a path; give a folder with --out")
    return RUNS / name


def find_run(text: str) -> Path:
    """Return the folder of an existing run, given its path or its name below `runs/`.

    Raises ConfigError if there is none.
    """
    for folder in (Path(text), RUNS / text):
        if folder.is_dir():
            return folder
    known = [folder.name for folder in RUNS.iterdir() if folder.is_dir()] if RUNS.is_dir() else []
    hint = nearest(text, known) if known else f"there is no run in {RUNS}/ yet"
    raise ConfigError(f"there is no run {text!r}; {hint}")
