"""The folder of a run: what it was made from, and what it has come to."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turnstile.config import Recipe
from turnstile.errors import ConfigError
from turnstile.evaluation.metrics import EpisodeResult

PACKAGES = ("turnstile-rl", "torch", "transformers", "peft", "numpy", "pytest", "safetensors")


def open_run(run: Path, recipe: Recipe, *, fresh: bool, given: Mapping[str, str] | None = None) -> bool:
    """Makes or reopens a run folder; True when there was one to go on with.

    `given` names what the call put in place of the recipe's parts. A folder made from another recipe, or with
    other parts, is refused, since going on with it would mix two runs.
    """
    resolved = recipe.model_dump(mode="json")
    given = dict(given or {})
    file = run / "resolved.json"
    if fresh and run.exists():
        if not file.is_file() and any(run.iterdir()):
            raise ConfigError(f"{run} is no run folder; --fresh would empty it, so give another name")
        shutil.rmtree(run)
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        if changed := _changed(before["recipe"], resolved) + _changed(before.get("given", {}), given):
            raise ConfigError(
                f"{run} was made with another recipe ({', '.join(changed[:3])} changed); "
                "give another run name, or --fresh to start it anew"
            )
        return True
    run.mkdir(parents=True, exist_ok=True)
    body = {"recipe": resolved, "given": given, "versions": versions(), "git": _git(), "command": sys.argv}
    write_whole(file, json.dumps(body, indent=1))
    return False


def versions() -> dict[str, str]:
    """Of Python and the packages that decide a run's numbers."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_results(run: Path, name: str, results: list[EpisodeResult]) -> None:
    """An evaluation's results, whole or not at all."""
    folder = run / "evaluations"
    folder.mkdir(exist_ok=True)
    write_whole(folder / f"{name}.jsonl", "".join(json.dumps(asdict(result)) + "\n" for result in results))


def write_whole(file: Path, text: str) -> None:
    """A killed process leaves the old file or the new one, never a part."""
    scratch = file.with_name(f".{file.name}.writing")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


def read_results(run: Path) -> dict[str, list[EpisodeResult]]:
    """Every finished evaluation of a run by name, oldest first."""
    files = sorted((run / "evaluations").glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
    return {
        file.stem: [EpisodeResult(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in files
    }


def drop_results(run: Path, name: str) -> None:
    """An evaluation that is to be done again."""
    (run / "evaluations" / f"{name}.jsonl").unlink()


def _changed(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of what differs."""
    names = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names += _changed(old, new, f"{prefix}{key}.")
        elif old != new:
            names.append(f"{prefix}{key}")
    return names


def _git() -> dict[str, str]:
    """The commit of the working folder and whether it was changed; empty outside a repository."""
    found = {}
    for name, command in (("commit", ["rev-parse", "HEAD"]), ("changed", ["status", "--porcelain"])):
        try:
            done = subprocess.run(["git", *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return {}
        found[name] = done.stdout.strip()
    return found
